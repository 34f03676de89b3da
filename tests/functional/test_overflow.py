"""One rule for numbers beyond a format's range, wherever qsim rounds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.accumulators import Rounded
from qsim.rounding import Overflow, overflow_in

BEYOND = torch.tensor([1e30, -1e30])
MODES = get_args(Overflow)
#: A format, its largest value, and what `"nonfinite"` makes of numbers beyond it.
FORMATS = [("fp16", 65504.0, math.inf), ("e4m3", 448.0, math.nan), ("e3m2", 28.0, math.nan)]


def in_fpu(fmt: str, overflow: Any) -> Tensor:
    with qsim.fpu(fmt, overflow=overflow):
        return BEYOND * 1


def summed(fmt: str, overflow: Any) -> Tensor:
    return qsim.matmul(BEYOND.view(2, 1), torch.ones(1, 1), Rounded(fmt, overflow=overflow)).flatten()


def updated(fmt: str, overflow: Any) -> Tensor:
    w = nn.Parameter(torch.ones(2))
    w.grad = -BEYOND
    qsim.optim.SGD([w], lr=1.0, format=fmt, update="nearest", overflow=overflow).step()
    return w.detach()


def rounded_after(fmt: str, overflow: Any) -> Tensor:
    w = nn.Parameter(torch.zeros(2))
    w.grad = -BEYOND
    qsim.optim.Quantized(torch.optim.SGD([w], lr=1.0), weight=qsim.Quantizer(fmt, overflow=overflow)).step()
    return w.detach()


ENTRIES: dict[str, Callable[[str, Any], Tensor]] = {
    "quantize": lambda fmt, overflow: qsim.quantize(BEYOND, fmt, overflow=overflow),
    "quantize_": lambda fmt, overflow: qsim.quantize_(BEYOND.clone(), fmt, overflow=overflow),
    "quantizer": lambda fmt, overflow: qsim.Quantizer(fmt, overflow=overflow)(BEYOND),
    "layer": lambda fmt, overflow: qsim.nn.Quantize(qsim.Quantizer(fmt, overflow=overflow))(BEYOND),
    "fpu": in_fpu,
    "accumulator": summed,
    "optimizer": updated,
    "quantized optimizer": rounded_after,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("overflow", MODES)
@pytest.mark.parametrize(("fmt", "largest", "nonfinite"), FORMATS)
def test_every_entry_point_has_the_same_modes(entry: str, overflow: Any, fmt: str, largest: float, nonfinite: float) -> None:
    is_finite = "saturate" in overflow or (overflow == "format" and nonfinite != math.inf)
    due = largest if is_finite else nonfinite
    found = ENTRIES[entry](fmt, overflow).tolist()
    assert str(found) == str([due, -due]), "a sign of NaN does not print"


@pytest.mark.parametrize("entry", ["optimizer", "fpu", "accumulator"])
def test_results_follow_the_format_by_default(entry: str) -> None:
    owner = {"optimizer": qsim.optim.SGD, "fpu": qsim.fpu, "accumulator": Rounded}[entry]
    assert inspect.signature(owner).parameters["overflow"].default == "format"
    assert all(inspect.signature(kind).parameters["overflow"].default == "format" for kind in (qsim.optim.AdamW, qsim.optim.Adam))


def test_a_quantizer_takes_the_default_of_its_place() -> None:
    spec = qsim.Quantizer("fp16")
    assert spec(BEYOND).tolist() == [65504.0, -65504.0]
    assert rounded_after("fp16", None).tolist() == [math.inf, -math.inf]
    assert qsim.FivePoint(act=spec, grad=spec).act.usual_overflow == "saturate"  # type: ignore[union-attr]
    assert qsim.FivePoint(act=spec, grad=spec).grad.usual_overflow == "nonfinite"  # type: ignore[union-attr]
    w = nn.Parameter(torch.zeros(2))
    w.grad = BEYOND.clone()
    qsim.optim.Quantized(torch.optim.SGD([w], lr=1.0), grad=spec).step()
    assert w.tolist() == [-65504.0, 65504.0]


def test_the_formats_own_mode() -> None:
    assert overflow_in(qsim.formats.INT8, "format") == "saturate"
    assert [overflow_in(qsim.formats.E4M3, mode) for mode in MODES] == ["saturate", "saturate_symmetric", "nonfinite", "saturate"]
    assert qsim.Quantizer("bf16", overflow="format").usual_overflow == "nonfinite"
    x = torch.tensor([1e9])
    assert qsim.encode(x, "e2m1", overflow="format").item() == qsim.encode(x, "e2m1").item()
    with pytest.raises(ValueError, match="overflow must be 'saturate', 'saturate_symmetric', 'nonfinite' or 'format', got 'inf'"):
        qsim.optim.AdamW([nn.Parameter(torch.ones(2))], overflow="inf")  # type: ignore[arg-type]
