"""The oracle's random bits: Random123's known answers, the library's bits, and independence of the code under test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from qsim.random import random_bits, stream
from support import philox_oracle
from support.random123 import ANSWERS

ORACLES = ("oracle", "oracle_arrays", "philox_oracle", "sum_oracle", "block_oracle", "written_out_updates")
#: What describes a format, an accumulator or a scale, without computing anything.
DESCRIPTIONS = {"qsim.formats", "qsim.accumulators", "qsim.rounding", "qsim.scaling"}


def test_known_answers() -> None:
    for answer in ANSWERS:
        assert philox_oracle.block(answer.counter, answer.key) == answer.words


@pytest.mark.parametrize("bits", [1, 6, 16, 17, 32])
@pytest.mark.parametrize(("seed", "number", "offset"), [(0, 0, 0), (-1, 5, 13), (2**62 + 7, 2**63 - 1, 2**35 + 3), (9, -2, 8)])
def test_the_library_draws_the_oracles_bits(bits: int, seed: int, number: int, offset: int) -> None:
    expected = philox_oracle.random_integers(50, bits, seed, number, offset)
    assert random_bits(50, bits, seed=seed, stream=number, offset=offset).tolist() == expected


def test_streams_have_the_oracles_numbers() -> None:
    for names in (("optimizer", 3), ("encoder.0", "weight", 7), ("1",), (1,)):
        assert stream(*names) == philox_oracle.stream(*names)


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_import_only_descriptions_from_the_library(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in imported if module.startswith("qsim")} <= DESCRIPTIONS
    others = {module.removeprefix("support.") for module in imported if module.startswith("support.")}
    assert others <= {*ORACLES, "comparing", "scales"}
