"""Emitted sums of products give the library's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qsim
from qsim.silicon import Dot, emit_circuits, vectors
from qsim.silicon.golden import values_of
from support import emitted
from support.sums_emitted import DOTS, SCALED_UNITS, by_matmul, by_program, compiled_sums, drawn_codes, script_of_sums, sizes


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.name)
def test_c_adds_as_matmul_does(dot: Dot, compiler: str, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 1000)
    command = compiled_sums(dot, tmp_path, compiler, ["-std=c99", *(emitted.SANITIZED if compiler == "gcc" else [])])
    assert same_bits(by_program(dot, codes, tmp_path, command), by_matmul(dot, codes))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.name)
def test_javascript_adds_as_matmul_does(dot: Dot, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 60)
    assert same_bits(by_program(dot, codes, tmp_path, script_of_sums(dot, tmp_path)), by_matmul(dot, codes))


@pytest.mark.slow
@pytest.mark.parametrize("dot", SCALED_UNITS, ids=lambda dot: dot.name)
def test_units_multiply_by_scales(dot: Dot, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 100_000)
    expected = by_matmul(dot, codes)
    assert same_bits(by_program(dot, codes, tmp_path, compiled_sums(dot, tmp_path, "gcc", ["-std=c99", *emitted.SANITIZED])), expected)
    assert same_bits(by_program(dot, codes[:1000], tmp_path, script_of_sums(dot, tmp_path)), expected[:1000])


@pytest.mark.slow
@pytest.mark.parametrize("dot", SCALED_UNITS, ids=lambda dot: dot.name)
def test_modules_multiply_by_scales(dot: Dot, tmp_path: Path) -> None:
    golden = vectors(dot)
    assert emitted.simulated(golden, tmp_path, "icarus") == f"0 of {len(golden)} results differ"


def test_scales_of_one_are_none(tmp_path: Path) -> None:
    dot = Dot("BlockScaled(8, 35, 4, exact=True)", "e2m1")
    a, b, *_ = sizes(dot)
    codes = drawn_codes(dot, 100)
    codes[:, a + b :] = 127
    left, right = values_of(codes[:, :a], dot.a), values_of(codes[:, a : a + b], dot.b)
    expected = qsim.matmul(left[:, None], right[:, :, None], dot.accumulator, formats=dot.a).view(-1)
    assert same_bits(by_program(dot, codes, tmp_path, compiled_sums(dot, tmp_path, "gcc", ["-std=c99"])), expected)


@pytest.mark.parametrize("fmt", ["e2m1", "fp16"])
def test_zero_stays_zero_whatever_the_random_integer(fmt: str, tmp_path: Path) -> None:
    """A sum's numbers are in the narrowest bits, where the code of zero is next to that of the smallest number."""
    golden = vectors(Dot(qsim.accumulators.Rounded(fmt, rounding=qsim.Stochastic(8)), "e2m1" if fmt == "e2m1" else "e4m3"), count=100)
    assert torch.equal(emitted.rows_in_c(golden, tmp_path, "gcc", ["-std=c99"]), golden.y)


def test_vectors_of_a_sum_in_one_bit() -> None:
    golden = vectors(Dot(qsim.accumulators.Rounded(qsim.Fixed(1, 0)), "e2m1"), count=100)
    assert set(golden.y.tolist()) == {0, 1}


def test_names_of_sums_tell_their_formats_apart() -> None:
    names = {Dot(qsim.accumulators.Rounded(qsim.Float(5, 10, bias=bias)), "e4m3").name for bias in (-3, 3)}
    assert len(names) == 2


def test_sums_that_are_no_circuits() -> None:
    with pytest.raises(ValueError, match="sequential order"):
        Dot("Rounded('fp16', order='kahan')", "e4m3")
    with pytest.raises(ValueError, match="reads 2"):
        emit_circuits("systemverilog", [Dot("Rounded('fp16', rounding='stochastic')", "e4m3", length=2)], generator=True)
