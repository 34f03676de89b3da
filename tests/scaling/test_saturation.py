"""Finite values stay finite under scales that saturate: products beyond the dtype of the result become its largest value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import qsim
from qsim.formats import E2M1, E4M3, E5M2, Fixed, Format, Int
from qsim.scaling import Given, PerAxis, PerBlock, PerTensor, PerTile, Scaling
from qsim.transforms import Hadamard
from support import covering
from support.comparing import first_difference, same_bits
from support.scaled_cases import DIFFERENT

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ELEMENTS: list[Format] = [E2M1, E4M3, E5M2, Int(8), Fixed(8, 6), Fixed(8, 8)]
#: Scales under which the largest finite inputs overflow float32, its 16-bit relatives, or both.
SCALINGS: list[Scaling] = [
    PerTensor(),
    PerTensor("e8m0", "ceil"),
    PerTensor(rule="ceil"),
    PerAxis(0, "e8m0", "even"),
    PerAxis(0, margin=64, outer=PerTensor()),
    PerBlock(4),
    PerBlock(4, margin=8),
    PerBlock(4, -1, "e8m0", "floor"),
    PerBlock(4, -1, "e8m0", "floor", 8),
    PerBlock(4, -1, "e8m0", "ceil"),
    PerBlock(4, -1, "e8m0", "even"),
    PerBlock(4, 0, "e4m3", outer=PerTensor()),
    PerBlock(4, -1, "e4m3", outer=PerTensor(margin=64)),
    PerBlock(4, -1, "e4m3", margin=3, outer=PerTensor("e8m0", "ceil")),
    PerTile(2, 2),
    PerTile(2, 4, "e4m3", outer=PerTensor()),
]


def extreme(dtype: torch.dtype) -> Tensor:
    """Rows of the largest values of a dtype, next to each other and next to small ones, of both signs; no infinity."""
    largest = torch.finfo(dtype).max
    shares = [1.0, -1.0, 1 - 2.0**-6, -0.995, 0.76, -0.51, 0.5, 2.0**-9, 0.0]
    wheel = torch.tensor([shares[(i * j + i) % len(shares)] for i in range(8) for j in range(8)], dtype=torch.float64)
    return (wheel.view(8, 8) * largest).to(dtype)


def written(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 products in a dtype, via float32 if it is not float64; values out of range become the largest."""
    for step in (torch.float32, dtype) if dtype != torch.float64 else (dtype,):
        largest = torch.finfo(step).max
        product = product.clamp(-largest, largest).to(step).to(torch.float64)
    return product.to(dtype)


def check(x: Tensor, format: Any, dtype: torch.dtype, **how: Any) -> None:
    """Check that every value is finite, equals the saturated product of its element and its scales, and is what its code decodes to."""
    found = qsim.quantize(x, format, dtype=dtype, **how)
    assert found.isfinite().all(), (format, how, found)
    decoding = {name: value for name, value in how.items() if name in ("scale", "dim")}
    encoded = qsim.encode(x, format, **how)
    if torch.float64 in (x.dtype, dtype) and x.dtype != dtype:
        return  # products in float64 on one side, in float32 on the other
    decoded = qsim.decode(encoded, format, dtype=dtype, **decoding)
    assert same_bits(decoded, found), first_difference(x, decoded, found)
    # In float64 no product overflows: neither that of a float32 element nor of two float32 scales.
    exact = qsim.decode(encoded, format, dtype=torch.float64, **decoding)
    assert torch.equal(written(exact, dtype), found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DIFFERENT)
def test_block_formats(name: str, dtype: torch.dtype) -> None:
    x = extreme(dtype)
    for target in DTYPES:
        check(x, name, target)
        check(x, name, target, rounding="up", dim=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_scales(scaling: Scaling, dtype: torch.dtype) -> None:
    x = extreme(dtype)
    # Three shares of the pairs, in which each scale meets each other one and each dtype.
    settings = [(element, target) for element in ELEMENTS for target in DTYPES]
    for element, target in covering.dealt(settings, SCALINGS.index(scaling) + DTYPES.index(dtype), 3):
        check(x, element, target, scale=scaling)


@given(
    st.sampled_from(DTYPES), st.sampled_from(ELEMENTS), st.sampled_from(SCALINGS), st.sampled_from(["nearest", "up", "odd", "stochastic"]),
    st.lists(st.floats(0.25, 1.0), min_size=8, max_size=8), st.integers(0, 255), st.integers(0, 130),
)  # fmt: skip
def test_any_large_values(
    dtype: torch.dtype, element: Format, scaling: Scaling, rounding: str, shares: list[float], signs: int, power: int
) -> None:
    flips = torch.tensor([1 - 2 * (signs >> i & 1) for i in range(8)])
    x = torch.tensor(shares, dtype=torch.float64) * flips * torch.finfo(dtype).max
    x[4:] *= 2.0**-power
    check(x.view(2, 4).to(dtype), element, dtype, scale=scaling, rounding=rounding, seed=3 if rounding == "stochastic" else None)


def test_by_hand() -> None:
    largest = torch.finfo(torch.float32).max
    # -2 times 2**127 is beyond float32, 127/64 times it is not.
    x = torch.tensor([-3.4e38, 3.4e38, 2.0**126])
    assert qsim.quantize(x, "mxint8").tolist() == [-largest, 127 / 64 * 2.0**127, 2.0**126]
    codes = qsim.encode(x, "mxint8")
    assert codes.codes.view(torch.int8).tolist() == [-128, 127, 32]
    assert qsim.decode(codes, "mxint8", dtype=torch.float64)[0] == -(2.0**128)
    assert qsim.decode(codes, "mxint8").tolist()[0] == -largest
    assert qsim.decode(codes, "mxint8", overflow="nonfinite").tolist()[0] == -math.inf
    # 65504 / 2**8 rounds to 256.
    assert qsim.quantize(torch.tensor([65504.0, 300.0]).half(), "fp8_1x128").tolist() == [65504, 288]
    # A float32 scale one step too large: the element stays the largest of its format.
    assert qsim.quantize(torch.tensor([largest]), "int8", scale=PerBlock(4)).item() == largest
    # The scale of a block times that of the tensor is beyond float32.
    assert qsim.quantize(torch.tensor([1e300, 0.0], dtype=torch.float64), "nvfp4").tolist() == [6 * largest, 0]
    assert qsim.quantize(torch.tensor([3e38]), "e4m3", scale=Given(1e38), dtype=torch.bfloat16).item() > 2.9e38
    assert qsim.quantize(torch.tensor([1e6]), "e4m3", scale=PerTensor(), dtype=torch.float16).item() == 65504


@pytest.mark.parametrize("name", ["mxint8", "fp8_1x128"])
def test_infinities_where_they_are_asked_for(name: str) -> None:
    x = torch.tensor([-65504.0, 65504.0]).half()
    found = qsim.quantize(x, name, overflow="nonfinite")
    assert found.isinf().any()
    if name != "mxint8":  # whose elements have no code for overflow
        codes = qsim.encode(x, name, overflow="nonfinite")
        assert same_bits(qsim.decode(codes, name, overflow="nonfinite", dtype=torch.float16), found)
        assert qsim.decode(codes, name, dtype=torch.float16).tolist() == [-65504, 65504]


def test_the_code_of_an_infinity_stays_one() -> None:
    codes = qsim.encode(torch.tensor([1.0, 2.0]), "e5m2", scale=Given(1.0))
    infinite = replace(codes, codes=torch.tensor([0x7C, 0xFC], dtype=torch.uint8))
    assert qsim.decode(infinite, "e5m2", scale=Given(1.0), dtype=torch.float16).tolist() == [math.inf, -math.inf]


def test_an_unknown_overflow_is_refused_by_decode() -> None:
    with pytest.raises(ValueError, match="overflow must be 'saturate', 'saturate_symmetric', 'nonfinite' or 'format', got 'wrap'"):
        qsim.decode(torch.tensor([1], dtype=torch.uint8), "e2m1", overflow="wrap")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transform_of_finite_values_is_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    hadamard = Hadamard(4, random_signs=False)
    turned = hadamard.wide(torch.tensor([largest, largest, -largest, largest], dtype=dtype))
    # float16 sums are exact in float32; the others saturate at a quarter of the largest value, so that four can be added.
    due = largest if dtype == torch.float16 else torch.finfo(turned.dtype).max / 4
    assert turned.tolist() == [due, -due, due, due]
    # Values that saturate do not change others, and infinities still poison their block.
    assert torch.equal(hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)), torch.tensor([5.0, -1, -2, 0], dtype=dtype))
    assert not hadamard.wide(torch.tensor([math.inf, 1, 1, 1], dtype=dtype)).isfinite().any()
