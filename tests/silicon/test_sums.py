"""Emitted sums of products give the library's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qsim.accumulators import BlockScaled
from qsim.silicon import Dot, emit_circuits
from support import emitted
from support.sums_emitted import DOTS, by_matmul, by_program, compiled_sums, drawn_codes, script_of_sums


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.name)
def test_c_adds_as_matmul_does(dot: Dot, compiler: str, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 1000)
    command = compiled_sums(dot, tmp_path, compiler, ["-std=c99", *(emitted.SANITIZED if compiler == "gcc" else [])])
    assert same_bits(by_program(dot, codes, tmp_path, command), by_matmul(dot, codes))


@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.name)
def test_javascript_adds_as_matmul_does(dot: Dot, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 300)
    assert same_bits(by_program(dot, codes, tmp_path, script_of_sums(dot, tmp_path)), by_matmul(dot, codes))


def test_sums_that_are_no_circuits() -> None:
    with pytest.raises(ValueError, match="sequential order"):
        Dot("Rounded('fp16', order='kahan')", "e4m3")
    with pytest.raises(ValueError, match="reads 2"):
        emit_circuits("systemverilog", [Dot("Rounded('fp16', rounding='stochastic')", "e4m3", length=2)], generator=True)
