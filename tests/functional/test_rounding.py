"""Roundings: their names, their repr, and errors for bad ones."""

from __future__ import annotations

import pickle

import pytest
import torch

import qsim
from qsim import Stochastic, rounding
from qsim.accumulators import Rounded
from qsim.rounding import Rounding
from support.comparing import same_bits

PLAIN = ["nearest", "nearest_away", "nearest_up", "nearest_down", "toward_zero", "up", "down", "odd"]


def test_names() -> None:
    assert list(rounding.NAMED) == [*PLAIN, "stochastic"]
    assert [str(rounding.resolve(name)) for name in PLAIN] == PLAIN
    assert rounding.resolve("stochastic") == Stochastic()
    for name in PLAIN:
        assert rounding.resolve(name) is getattr(rounding, name.upper())
    assert rounding.resolve(Stochastic(3)) == Stochastic(3)


@pytest.mark.parametrize(
    "how",
    [*rounding.NAMED.values(), Stochastic(6), Stochastic(bits=32, correction=True), Stochastic(correction=True), Stochastic(3, "even")],
    ids=repr,
)
def test_values(how: Rounding) -> None:
    assert eval(repr(how), vars(rounding)) == how
    assert pickle.loads(pickle.dumps(how)) == how
    assert hash(pickle.loads(pickle.dumps(how))) == hash(how)
    with pytest.raises(AttributeError):
        how.mode = 3  # type: ignore[assignment,misc]


def test_differences() -> None:
    every = {*rounding.NAMED.values(), Stochastic(1), Stochastic(2), Stochastic(1, correction=True), Stochastic(1, correction="even")}
    assert len(every) == 13
    assert [how.is_stochastic for how in rounding.NAMED.values()] == [False] * 8 + [True]
    assert repr(Stochastic(6, correction=True)) == "Stochastic(bits=6, correction=True)"
    assert repr(Stochastic(6, correction="even")) == "Stochastic(bits=6, correction='even')"


@pytest.mark.parametrize("bits", [0, -1, 33])
def test_impossible_bits(bits: int) -> None:
    with pytest.raises(ValueError, match=f"Stochastic: bits must be in 1…32, got {bits}"):
        Stochastic(bits)


@pytest.mark.parametrize("bits", [1.0, "8", True])
def test_bits_of_another_kind(bits: object) -> None:
    with pytest.raises(TypeError, match="Stochastic: bits must be an int or None, got"):
        Stochastic(bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("correction", [1, "no", None])
def test_correction_of_another_kind(correction: object) -> None:
    with pytest.raises(TypeError, match=f"Stochastic: correction must be True, False or 'even', got {correction!r}"):
        Stochastic(6, correction)  # type: ignore[arg-type]


def test_ties_by_hand() -> None:
    x = torch.tensor([-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    ties = {
        "nearest": [-4.0, -2.0, -2.0, -0.0, 0.0, 2.0, 2.0, 4.0],
        "nearest_away": [-4.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0],
        "nearest_up": [-3.0, -2.0, -1.0, -0.0, 1.0, 2.0, 3.0, 4.0],
        "nearest_down": [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0],
        "toward_zero": [-3.0, -2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 3.0],
        "up": [-3.0, -2.0, -1.0, -0.0, 1.0, 2.0, 3.0, 4.0],
        "down": [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0],
        "odd": [-3.0, -3.0, -1.0, -1.0, 1.0, 1.0, 3.0, 3.0],
    }
    for name, expected in ties.items():
        assert qsim.quantize(x, qsim.Int(8), rounding=name).tolist() == expected, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_saturation_by_hand(dtype: torch.dtype) -> None:
    """The smallest integer of two's complement is never a result; formats without such a number saturate as usual."""
    x = torch.tensor([-torch.inf, -1e9, -128.0, -127.5, -127.0, -0.75, 127.5, torch.inf], dtype=dtype)
    assert qsim.quantize(x, "int8", overflow="saturate_symmetric").tolist() == [*[-127.0] * 5, -1.0, 127.0, 127.0]
    unsigned = qsim.quantize(x, qsim.Fixed(8, 0, signed=False), overflow="saturate_symmetric")
    assert unsigned.tolist() == [0.0] * 6 + [128.0, 255.0]
    assert qsim.encode(x, "int8", overflow="saturate_symmetric").tolist() == [0x81] * 5 + [0xFF, 0x7F, 0x7F]
    for fmt in ("e4m3", "e2m1", "bf16"):
        assert same_bits(qsim.quantize(x, fmt, overflow="saturate_symmetric"), qsim.quantize(x, fmt))


def test_symmetric_saturation_in_quantizers_and_sums() -> None:
    given = qsim.Quantizer("int4", overflow="saturate_symmetric")
    assert given(torch.tensor([-9.0, -8.0, 8.0])).tolist() == [-7.0, -7.0, 7.0]
    a, b = torch.tensor([[-100.0, -28.0]]), torch.ones(2, 1)
    found = [qsim.matmul(a, b, Rounded("int8", overflow=how)).item() for how in ("saturate", "saturate_symmetric")]
    assert found == [-128.0, -127.0]
