"""Products of float32 operands that keep all of their bits.

Torch's settings may reduce their precision: to TF32's 11 significant bits on a GPU, the default for convolutions, and to bfloat16 on a CPU.
Values of a format with more bits must not be reduced. So the settings are changed for one product at a time, inside operators, where a
compiler cannot bake a setting in. The settings belong to the process: threads take turns, or one would mistake another's change for the
original setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, backends

#: Arguments of convolutions after their tensors.
NUMBERS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
_turn = RLock()


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def _convolution(a: Tensor, w: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    return torch.ops.aten.convolution(a, w, bias, *numbers)  # type: ignore[no-any-return]


@contextmanager
def unshortened(first: Tensor, *, is_matmul: bool) -> Iterator[None]:
    """Make torch multiply float32 in full precision, where a tensor is."""
    with _turn, _unshortened_cublas() if first.is_cuda and is_matmul else _unshortened(first, is_matmul):
        yield


@contextmanager
def _unshortened(first: Tensor, is_matmul: bool) -> Iterator[None]:
    backend: Any = backends.cudnn if first.is_cuda else backends.mkldnn  # attributes exist only at run time
    setting = backend.matmul if is_matmul else backend.conv
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


@contextmanager
def _unshortened_cublas() -> Iterator[None]:
    """For matrix products on a GPU torch has an old setting and a new one, and raises an error if they differ."""
    setting = backends.cuda.matmul
    if setting.fp32_precision != "tf32":
        yield
        return
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # only the new one was set
        old = None
    setting.allow_tf32 = False
    try:
        yield
    finally:
        if old is None:
            setting.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(old)


def _operator(name: str, schema: str, plain: Callable[..., Tensor], fake: Callable[..., Tensor], *tags: torch.Tag) -> Callable[..., Tensor]:
    """Make an operator from torch's own function."""

    def exact(*args: Any) -> Tensor:
        with unshortened(args[0], is_matmul=plain is _matmul):
            return plain(*args)

    torch.library.custom_op(f"qsim::{name}", exact, mutates_args=(), schema=schema, tags=tags).register_fake(fake)
    return getattr(torch.ops.qsim, name).default  # type: ignore[no-any-return]


# Compiled code may pass channels-last tensors to convolutions.
_FREE = torch.Tag.flexible_layout

#: `torch.matmul`, `aten::convolution` and the gradient of one of its operands, with all bits of their operands.
matmul = _operator("float32_matmul", "(Tensor a, Tensor b) -> Tensor", _matmul, _matmul)
convolution = _operator(
    "float32_convolution", f"(Tensor a, Tensor w, Tensor? bias, {NUMBERS}) -> Tensor", _convolution, _convolution, _FREE
)
