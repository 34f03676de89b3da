"""The library that multiplies on the chip: torch's own products, on an H100 or H200."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from qsim_kernels.chip.products import ChipProduct

#: The compute capability of H100 and H200, with which the descriptions were compared.
_HOPPER = (9, 0)


class Multiply(Protocol):
    """A call of a library that multiplies two matrices and adds a bias to each row, if it is given one."""

    def __call__(self, a: Tensor, b: Tensor, /, *, bias: Tensor | None = None) -> Tensor:
        """The product of matrices in the dtypes of a `ChipProduct`."""


class Library(Protocol):
    """Products of matrices on a chip."""

    def obstacle(self, device: torch.device) -> str:
        """The reason why a device is not the chip; empty if it is."""

    def is_capturing(self) -> bool:
        """Whether calls are recorded now, so that no result can be read."""

    def settings(self, product: ChipProduct) -> Hashable:
        """The settings that may change how a product is computed; `()` if there are none."""

    def multiplier(self, product: ChipProduct, dtype: torch.dtype, one: Tensor) -> Multiply:
        """The call that computes a product in one of its results' dtypes, given the number 1 on the chip, in float32."""


class Hopper:
    """Torch's products on an H100 or H200."""

    def obstacle(self, device: torch.device) -> str:
        """The reason why a device is not an H100 or H200."""
        return _obstacle(device)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def settings(self, product: ChipProduct) -> Hashable:
        """Torch's settings for 16-bit sums, by which its library chooses among kernels."""
        if product.is_fp8:
            return ()
        matmul = torch.backends.cuda.matmul
        return matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction

    def multiplier(self, product: ChipProduct, dtype: torch.dtype, one: Tensor) -> Multiply:
        """Torch's own operator, bound so that a call is one call of C; FP8 operands have scales of 1."""
        if not product.is_fp8:
            return _multiply_in_16_bits if dtype == product.a else partial(_multiply_in_16_bits, out_dtype=dtype)
        return partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=product.fast)


def _multiply_in_16_bits(a: Tensor, b: Tensor, /, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    """A product in 16 bits; autocast would change its operands."""
    assert bias is None  # `ChipProduct.adds_bias`
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b, **options)


def is_chip(kind: str, index: int | None) -> bool:
    """Whether a device, given by its type and index, is an H100 or H200."""
    return kind == "cuda" and not _obstacle(torch.device(kind) if index is None else torch.device(kind, index))


# Under torch.compile the result is a constant.
is_chip._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _obstacle(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the operands are on {device.type}, not on an H100 or H200"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != _HOPPER:
        return f"{torch.cuda.get_device_name(device)} is not an H100 or H200"
    return ""


@lru_cache(maxsize=64)
def one_on(device: torch.device) -> Tensor:
    """The number 1 on a device."""
    return torch.ones((), device=device)
