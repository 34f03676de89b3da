"""A matrix rounded and its rows summed in one read: Triton compared with the reference, bit for bit, and the sums with exact ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim import Stochastic, rounding as roundings
from qsim.formats import E2M1, E4M3, E5M2, FP16, Float, Format, Int, holds
from qsim_kernels import Rule, torch as reference
from qsim_kernels.numbers.grid import GridRounding, spell
from support import inputs
from support.comparing import first_difference, same_bits
from support.side_by_side import DEVICE, difficult, kernels, rule, seed

from qsim_kernels.triton.reductions import row_sums  # isort: skip (imports triton, for which the line above has chosen the interpreter)

E4M0 = Float(4, 0)

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def both(x: Tensor, fmt: Format, how: Rule, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounded values and sums from the reference, then from the kernels."""
    results = []
    for module in (reference, kernels):
        out = torch.full(x.shape, 77, dtype=dtype or x.dtype, device=x.device)
        results += [out, module.quantize_and_sum_into(out, x, GridRounding(fmt.grid, how), (seed(3**25), 5, 0))]
    return results[0], results[1], results[2], results[3]


def check_sums(x: Tensor, sums: Tensor) -> None:
    """Compare sums with exact ones.

    In whatever order n numbers are added, the error is at most (n − 1) u / (1 − (n − 1) u) of the sum of their magnitudes, with u half the
    spacing behind 1 of the dtype that the sum is kept in.
    """
    assert sums.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert sums.shape == x.shape[1:]
    errors = max(0, len(x) - 1) * torch.finfo(sums.dtype).eps / 2
    for column, found in zip(x.double().t().tolist(), sums.tolist(), strict=True):
        # fsum rounds once, to float64.
        exact, size = math.fsum(column), math.fsum(map(abs, column))
        assert abs(found - exact) <= errors / (1 - errors) * size + abs(exact) * 2.0**-53


def check(x: Tensor, fmt: Format, how: Rule, dtype: torch.dtype | None = None) -> None:
    """Compare rounded values bit for bit, and both sums with exact ones."""
    a, sums, b, other = both(x, fmt, how, dtype)
    assert not first_difference(x, a, b), f"{how}: {first_difference(x, a, b)}"
    check_sums(x, sums)
    check_sums(x, other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", [1, 5, 8, 256, 264, 512, 1024, 1032])
@pytest.mark.parametrize("rows", [0, 1, 7, 9])
def test_any_shape(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, device=DEVICE)
    check(x, E4M3, rule("nearest", "saturate"))
    if rows < 9:
        check(x, E4M3, rule("stochastic", "saturate"))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [8, 264])
def test_many_rows(columns: int, dtype: torch.dtype) -> None:
    # In few columns, more partial sums than are added up at once.
    rows = 40 if columns > 8 else 65 * 8 + 3
    check(torch.randn(rows, columns, device=DEVICE).to(dtype), Float(4, 0), rule("nearest", "saturate"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("warps", [1, 3])
def test_how_many_rows_a_program_takes_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, warps: int) -> None:
    # All 40; or 14, of which the last program has fewer.
    x = torch.randn(40, 40, device=DEVICE)
    monkeypatch.setattr(row_sums, "_WARPS", warps)
    check(x, E4M3, rule("stochastic", "saturate"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize("fmt", [E4M3, E2M1, E4M0, Int(8), FP16], ids=repr)
def test_whatever_is_rounded(fmt: Format, source: torch.dtype) -> None:
    x = difficult(fmt, source)[:512].view(2, 256)
    chosen: list[tuple[str | roundings.Rounding, str]] = [
        ("nearest", "nonfinite"),
        ("up", "saturate"),
        ("stochastic", "saturate"),
        (Stochastic(17, correction=True), "nonfinite"),
    ]
    for rounding, overflow in chosen:
        a, _, b, _ = both(x, fmt, rule(rounding, overflow), source if holds(source, fmt) else torch.float32)
        assert not first_difference(x, a, b), f"{rounding}, {overflow}: {first_difference(x, a, b)}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize("target", inputs.DTYPES)
def test_any_carrier(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.randn(9, 8, device=DEVICE).to(source)
    for rounding in ("nearest", "stochastic"):
        check(x, E5M2, rule(rounding, "saturate"), target)


@pytest.mark.parametrize("columns", [7, 8])
def test_non_finite_values_are_summed_too(columns: int) -> None:
    x = torch.ones(9, columns, device=DEVICE)
    x[3, 0], x[8, 1], x[0, 2], x[0, 3], x[8, 3] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    x[:, 4], x[:, 5] = -0.0, 2.0**-149
    a, sums, b, other = both(x, E4M3, rule("nearest", "saturate"))
    assert same_bits(a, b)
    expected = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, 0, 9 * 2.0**-149, 9, 9], device=DEVICE)[:columns]
    for found in (sums, other):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_any_strides_and_alignment() -> None:
    memory = torch.randn(9 * 16 + 1, device=DEVICE)
    how = rule("stochastic", "saturate")
    wide = memory[:-1].view(9, 16)
    for x in (memory[1:].view(9, 16), wide[:, ::2], wide[:, 1:9], wide[:8].t(), wide[:1, :8].expand(9, 8)):
        check(x, E4M3, how)
        a, _, b, other = both(x.contiguous(), E4M3, how)
        strided = both(x, E4M3, how)
        assert same_bits(strided[0], a)
        assert same_bits(strided[2], b)
        # The same numbers are added in the same order, whatever their memory layout.
        assert same_bits(strided[3], other)


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_values_are_those_of_quantize(device: torch.device, dtype: torch.dtype) -> None:
    # The operator combines two others, wherever the seed is stored, and sums the values before rounding.
    x = torch.randn(33, 24, device=device).to(dtype)
    how, grid = spell(rule("stochastic", "saturate")), spell(E4M3.grid)
    operators: Any = torch.ops.qsim
    for given in {torch.device("cpu"), device}:
        number = torch.tensor(77, device=given)
        values, sums = operators.quantize_and_sum(x, number, grid, how, 1, torch.bfloat16)
        assert same_bits(values, operators.quantize(x, number, grid, how, 1, 0, torch.bfloat16))
        assert not same_bits(values, operators.quantize(x, number, grid, how, 2, 0, torch.bfloat16))
        check_sums(x, sums)
