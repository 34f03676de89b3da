"""float64 as a format, and float64 numbers rounded once to every other kind of format: against Python's fractions and `struct`."""

from __future__ import annotations

import math
import random
import re
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.formats import FP32, FP64, Float, Log, Posit, Takum
from qsim.rounding import NAMED
from support.comparing import same_bits

#: Both ends of every range: zeros, subnormals, the largest number, infinities, NaN.
_ENDS = (0.0, 5e-324, 2.0**-1022, math.nextafter(2.0**-1022, 0), FP64.max, math.inf)
EDGES = (*_ENDS, *(-x for x in _ENDS), math.nan)


def numbers(count: int = 500) -> list[float]:
    """Random bit patterns, and the edges."""
    draw = random.Random(3)
    return [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(count)] + list(EDGES)


def tensor(given: list[float]) -> Tensor:
    return torch.tensor(given, dtype=torch.float64)


def test_names() -> None:
    for name in ("fp64", "float64", "Double", "e11m52", torch.float64, repr(FP64)):
        assert qsim.format(name) == FP64
    assert qsim.formats.name_of(FP64) == "fp64"
    facts = torch.finfo(torch.float64)
    assert (FP64.max, FP64.smallest_normal, FP64.epsilon, FP64.bits) == (facts.max, facts.tiny, facts.eps, 64)
    assert Fraction(FP64.smallest) == Fraction(1, 2**1074)
    assert qsim.formats.holders(FP64) == [torch.float64]
    assert qsim.formats.contains(FP64, FP32)
    assert not qsim.formats.contains(FP32, FP64)


@pytest.mark.parametrize("rounding", NAMED)
def test_no_number_moves(rounding: str, device: torch.device) -> None:
    given, seed = numbers(), 0 if rounding == "stochastic" else None
    x = tensor(given).to(device)
    for overflow in ("saturate", "saturate_symmetric", "nonfinite", "format"):
        found = qsim.quantize(x, "float64", rounding, overflow=overflow, seed=seed)  # type: ignore[arg-type]
        expected = x if overflow in ("nonfinite", "format") else x.clamp(-FP64.max, FP64.max)
        assert same_bits(found[~x.isnan()], expected[~x.isnan()]), (rounding, overflow)
        assert torch.equal(found.isnan(), x.isnan())


def test_codes_are_its_bits(device: torch.device) -> None:
    given = numbers()
    codes = qsim.encode(tensor(given).to(device), "float64", overflow="nonfinite")
    assert codes.dtype == torch.int64
    for number, code in zip(given, codes.tolist(), strict=True):
        assert math.isnan(number) or code == struct.unpack("<q", struct.pack("<d", number))[0], number
    assert same_bits(qsim.decode(codes, "float64", dtype=torch.float64).nan_to_num(3.0), tensor(given).to(device).nan_to_num(3.0))


def test_float32_numbers_are_widened() -> None:
    x = torch.tensor([0.1, -1e-45, 3.4e38, -0.0, math.inf])
    expected = x.double()
    assert same_bits(qsim.quantize(x, "e11m52", overflow="nonfinite", dtype=torch.float64), expected)
    assert qsim.quantize(x, "e11m52", dtype=torch.float64)[4] == FP64.max
    with pytest.raises(ValueError, match=r"x: torch.float32 cannot hold every value of Float\(11, 52, specials='ieee'\) .*; float64 can$"):
        qsim.quantize(x, "e11m52")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_point_changes_nothing_but_the_product(dtype: torch.dtype) -> None:
    """The product of float32 operands is computed in float64, and rounded once."""
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 8, bias=False, dtype=dtype), torch.randn(5, 24, dtype=dtype)
    y = qsim.convert(nn.Sequential(layer), qsim.FivePoint("float64", "float64", "float64"))(x)
    y.sum().backward()
    assert torch.equal(y, (x.double() @ layer.weight.double().T).to(dtype))
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, (torch.ones(8, 5, dtype=torch.float64) @ x.double()).to(dtype))


def test_an_optimizer_is_the_plain_one() -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64)) for _ in range(2)]
    plain, own = (torch.optim.SGD([weight], 0.1, momentum=0.9) for weight in weights)
    quantized = qsim.optim.Quantized(own, weight="float64", grad="float64", state="float64")
    for _ in range(3):
        for weight, optimizer in zip(weights, (plain, quantized), strict=True):
            weight.grad = weight.detach().sin()
            optimizer.step()
    assert same_bits(*(weight.detach() for weight in weights))
    single = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(ValueError, match=r"weight of parameter 0: torch.float32 cannot hold every value of Float\(11, 52.*float64 can"):
        qsim.optim.Quantized(single, weight="float64")


@pytest.mark.parametrize("fmt", [Posit(10), Takum(10), Log(4, 5)], ids=repr)
def test_float64_is_directed_once_onto_tables(fmt: qsim.formats.Format) -> None:
    """A hair above a value, which float32 would drop, goes to the next one."""
    values = fmt.values()
    for number in random.Random(2).sample(range(1, len(values) - 1), 40):
        x = math.nextafter(values[number], math.inf)
        assert qsim.quantize(tensor([x]), fmt, "up").item() == values[number + 1]
        assert qsim.quantize(tensor([x]), fmt, "down").item() == values[number]


def test_elements_under_scales_are_rounded_once() -> None:
    """With powers of two as scales, blocks are exact in float64."""
    x = tensor([6.0, 2.5 + 2.0**-40, -2.5 - 2.0**-40, 2.5 - 2.0**-40] + [0.0] * 28) * 2.0**-9
    assert (qsim.quantize(x, "mxfp4") * 2.0**9).tolist()[:4] == [6.0, 3.0, -3.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Float(11, 52), ValueError, "Float: of 11 exponent and 52 mantissa bits only float64 is emulated, Float(11, 52, specials="),
        (lambda: Float(11, 52, specials="ieee", subnormals=False), ValueError, "only float64 is emulated"),
        (lambda: Float(11, 20), ValueError, "Float: exponent must be in 1…8, got 11"),
        (lambda: Float(8, 52), ValueError, "Float: mantissa must be in 0…23, got 52"),
        (lambda: qsim.scaling.PerTensor("fp64"), ValueError, "scales are float32, which cannot hold every value of Float(11, 52"),
        (lambda: qsim.accumulators.Rounded("fp64"), ValueError, "Rounded: fp64 has 52 mantissa bits, and sums have 51"),
        (lambda: qsim.decode(torch.zeros(1, dtype=torch.int64), "fp64"), ValueError, "dtype: torch.float32 cannot hold every value of"),
        (lambda: qsim.silicon.emit("c", "fp64"), ValueError, "has values that float32 lacks: circuits compute with float32's bits"),
    ],
)  # fmt: skip
def test_errors(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()  # type: ignore[operator]
