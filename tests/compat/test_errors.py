"""Errors of `qsim.compat.qtorch` for bad input, and the modules in which QPyTorch has its names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from qsim.compat import qtorch
from qsim.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint
from qsim.compat.qtorch.auto_low import lower, sequential_lower
from qsim.compat.qtorch.quant import block_quantize, fixed_point_quantize, float_quantize, quantizer


def test_modules_are_where_they_are_in_qtorch() -> None:
    from qsim.compat.qtorch.auto_low.auto_low import lower as as_there
    from qsim.compat.qtorch.optim.optim_low import OptimLP
    from qsim.compat.qtorch.quant.quant_function import quantizer as function
    from qsim.compat.qtorch.quant.quant_module import Quantizer

    assert qtorch.quant.quantizer is function
    assert qtorch.quant.Quantizer is Quantizer
    assert qtorch.auto_low.lower is as_there
    assert qtorch.optim.OptimLP is OptimLP
    assert issubclass(qtorch.FixedPoint, qtorch.Number)


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: FixedPoint(0, 4), ValueError, r"FixedPoint: wl must be in 1…256, got 0"),
    (lambda: FixedPoint(257, 4), ValueError, r"FixedPoint: wl must be in 1…256, got 257"),
    (lambda: FixedPoint(1, 4, symmetric=True), ValueError, r"FixedPoint: wl must be in 2…256, got 1"),
    (lambda: FixedPoint(8.0, 4), TypeError, r"FixedPoint: wl must be an int, got 8\.0"),  # type: ignore[arg-type]
    (lambda: FixedPoint(8, 100), ValueError, r"FixedPoint: fl must be in -64…64, got 100"),
    (lambda: FixedPoint(8, 4, clamp=1), TypeError, r"FixedPoint: clamp must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: FixedPoint(8, 4, symmetric=0), TypeError, r"FixedPoint: symmetric must be True or False, got 0"),  # type: ignore[arg-type]
    (lambda: FloatingPoint(9, 3), ValueError, r"FloatingPoint: exp must be in 1…8, got 9"),
    (lambda: FloatingPoint(4, 24), ValueError, r"FloatingPoint: man must be in 0…23, got 24"),
    (lambda: BlockFloatingPoint(1), ValueError, r"BlockFloatingPoint: wl must be in 2…256, got 1"),
    (lambda: BlockFloatingPoint(8, -2), ValueError, r"BlockFloatingPoint: dim must be in -1…63, got -2"),
    (lambda: block_quantize(torch.ones(3), 8, dim=1), IndexError, r"no dimension 1 in a tensor of shape \(3,\)"),
    (lambda: float_quantize(torch.ones(3), 4, 3, rounding="nearset"), ValueError, r"unknown rounding 'nearset': did you mean 'nearest'\?"),
    (lambda: float_quantize([1.0], 4, 3), TypeError, r"x must be a tensor, got list"),  # type: ignore[arg-type]
    (lambda: float_quantize(torch.ones(3, dtype=torch.int64), 4, 3), TypeError, r"x must be float32, .* got torch\.int64"),
    (lambda: float_quantize(torch.ones(3).half(), 8, 7), ValueError, r"float16 cannot hold every value of Float\(8, 7"),
    (lambda: float_quantize(torch.ones(3), 32, 3), ValueError, r"float_quantize: exp must be in 1…31, got 32"),
    (lambda: float_quantize(torch.ones(3).double(), 9, 3), ValueError, r"float_quantize: exp must be in 1…8 for float64, .* got 9"),
    (lambda: float_quantize(torch.ones(3).half(), 9, 3), ValueError, r"float16 cannot hold every value of Float\(8, 3"),
    (lambda: fixed_point_quantize(torch.ones(3).half(), 32, 16), ValueError, r"float16 cannot hold every value of Fixed\(32, 16\)"),
    (
        lambda: fixed_point_quantize(torch.ones(3).half(), 40, 16),
        ValueError,
        r"FixedPoint: .*float16 cannot hold words of 40 bits; float32 and",
    ),
    (lambda: block_quantize(torch.ones(3).bfloat16(), 40), ValueError, r"BlockFloatingPoint: .*bfloat16 cannot hold words of 40 bits; "),
    (lambda: block_quantize(torch.ones(3), 40, dim=1), IndexError, r"no dimension 1 in a tensor of shape \(3,\)"),
    (lambda: fixed_point_quantize([1.0], 8, 4, clamp=False), TypeError, r"FixedPoint: x must be a tensor, got list"),  # type: ignore[arg-type]
    (lambda: quantizer("fp8"), TypeError, r"quantizer: forward_number must be a FixedPoint, .* got 'fp8'"),  # type: ignore[arg-type]
    (lambda: quantizer(None, 8), TypeError, r"quantizer: backward_number must be a FixedPoint, .* got 8"),  # type: ignore[arg-type]
    (lambda: quantizer(None, None, "up", "upwards"), ValueError, r"unknown rounding 'upwards'"),
    (lambda: quantizer(backward_hooks=[3]), TypeError, r"quantizer: backward_hooks must be functions, got 3"),  # type: ignore[list-item]
    (lambda: quantizer(clamping_grad_zero=1), TypeError, r"clamping_grad_zero must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: quantizer(FloatingPoint(4, 3), clamping_grad_zero=True), ValueError, r"is for a FixedPoint with clamp=True, got .*Floating"),
    (lambda: quantizer(FixedPoint(4, 3, clamp=False), clamping_grad_zero=True), ValueError, r"is for a FixedPoint with clamp=True, got"),
    (lambda: quantizer(FixedPoint(4, 3))(3.0), TypeError, r"quantizer: x must be a tensor, got float"),  # type: ignore[arg-type]
    (lambda: lower(nn.ReLU(), ["relu"]), ValueError, r"lower: layer_types must be of 'conv', .*'loss', got 'relu'"),
    (lambda: lower(nn.ReLU(), "conv"), TypeError, r"lower: layer_types must be a list of names, got the text 'conv'"),
    (lambda: sequential_lower(torch.relu), TypeError, r"sequential_lower: model must be a torch\.nn\.Module, got"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS, ids=[words for *_, words in ERRORS])
def test_errors(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
