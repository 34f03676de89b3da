"""The library that multiplies on the chip: torch's own products on an H100 or H200, and which description of a sum belongs to which."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qsim_kernels import private
from qsim_kernels.numbers.grid import Mode
from qsim_kernels.numbers.sums import CHUNK_SUM, SINGLE_GRID, AlignedSum, PromotedSum, Sum
from qsim_kernels.torch.persistent import persistent

#: The running sum of FP8 products: float32 without its ten last bits.
_E8M13 = SINGLE_GRID._replace(
    mantissa=13, least=2.0**-139, max=(2.0 - 2.0**-13) * 2.0**127, min=-(2.0 - 2.0**-13) * 2.0**127
)  # fmt: skip
_FP8 = AlignedSum(_E8M13, int(Mode.TOWARD_ZERO), block=32, fraction=13, low_a=-6, low_b=-6)
#: Products that are added before FP8 sums are promoted.
_PROMOTED_EVERY = 128
#: The dtypes of FP8 and of 16-bit operands by the exponents of their formats' smallest normal numbers.
_NARROW = {-6: torch.float8_e4m3fn, -14: torch.float8_e5m2}
_HALF = {-126: torch.bfloat16, -14: torch.float16}
#: What FP8 products need a multiple of: columns, and elements along the sum.
_MULTIPLE = 16


class ChipProduct(NamedTuple):
    """A product of torch's library that adds on a GPU like a description.

    Attributes:
        a: The dtype of the left operand.
        b: The dtype of the right operand.
        fast: Whether FP8 sums are not promoted: `use_fast_accum` of `torch._scaled_mm`.
    """

    a: torch.dtype
    b: torch.dtype
    fast: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are FP8: the left one is then read by rows, and the right one by columns."""
        return self.a.itemsize == 1

    @property
    def results(self) -> tuple[torch.dtype, ...]:
        """The dtypes in which the library returns results."""
        return (torch.float32, torch.bfloat16, torch.float16) if self.is_fp8 else (torch.float32, self.a)

    def adds_bias(self, bias: torch.dtype, result: torch.dtype) -> bool:
        """Whether the library also adds a bias of a dtype to results of another."""
        return self.is_fp8 and bias == result and result in (torch.bfloat16, torch.float16)

    def obstacle(self, rows: int, length: int, columns: int) -> str:
        """The reason why the library has no such product of a shape; empty if it has."""
        if self.is_fp8 and private.scaled_mm is None:
            return "this torch has no torch._scaled_mm"
        if self.is_fp8 and (length % _MULTIPLE or columns % _MULTIPLE):
            sizes = f"got {length} and {columns}"
            return f"its FP8 products need multiples of {_MULTIPLE} along the sum and as the number of columns, {sizes}"
        return ""


@lru_cache(maxsize=1024)
def product_of(how: Sum) -> ChipProduct | None:
    """The product that adds like a description on an H100 or H200, if there is one.

    Example:
        >>> from qsim_kernels.chip.library import product_of
        >>> from qsim_kernels.numbers.sums import CHUNK_SUM
        >>> product_of(CHUNK_SUM).a, product_of(CHUNK_SUM._replace(fraction=24))
        (torch.bfloat16, None)
    """
    inner, is_promoted = (how.inner, how.every == _PROMOTED_EVERY) if isinstance(how, PromotedSum) else (how, False)
    if not isinstance(inner, AlignedSum):
        return None
    lows = inner.low_a, inner.low_b
    if inner == CHUNK_SUM._replace(low_a=lows[0], low_b=lows[1]) and inner is how and lows[0] == lows[1] and lows[0] in _HALF:
        return ChipProduct(_HALF[lows[0]], _HALF[lows[0]])
    is_fp8 = inner == _FP8._replace(low_a=lows[0], low_b=lows[1]) and set(lows) <= set(_NARROW)
    # The library does not multiply two operands in E5M2.
    if not is_fp8 or lows == (-14, -14) or not (is_promoted or inner is how):
        return None
    return ChipProduct(_NARROW[lows[0]], _NARROW[lows[1]], fast=not is_promoted)


#: The compute capability of H100 and H200, with which the descriptions were compared.
_HOPPER = (9, 0)


class Multiply(Protocol):
    """A call of a library that multiplies two matrices and adds a bias to each row, if it is given one."""

    def __call__(self, a: Tensor, b: Tensor, /, *, bias: Tensor | None = None) -> Tensor:
        """The product of matrices in the dtypes of a `ChipProduct`."""


class ProductLibrary:
    """Torch's products on an H100 or H200."""

    def obstacle(self, device: torch.device) -> str:
        """The reason why a device is not an H100 or H200; empty if it is."""
        return _obstacle(device)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured, so that no result can be read."""
        return torch.cuda.is_current_stream_capturing()

    def settings(self, product: ChipProduct) -> Hashable:
        """Torch's settings for 16-bit sums, by which its library chooses among kernels; `()` for a product without any."""
        if product.is_fp8:
            return ()
        matmul = torch.backends.cuda.matmul
        return matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction

    def multiplier(self, product: ChipProduct, dtype: torch.dtype, one: Tensor) -> Multiply:
        """The call that computes a product in one of its results' dtypes, given the number 1 on the chip, in float32.

        It is torch's own operator, bound so that a call is one call of C; FP8 operands have scales of 1.
        """
        if not product.is_fp8:
            return _multiply_in_16_bits if dtype == product.a else partial(_multiply_in_16_bits, out_dtype=dtype)
        return partial(private.scaled_mm, scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=product.fast)


def _multiply_in_16_bits(a: Tensor, b: Tensor, /, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    """A product in 16 bits; autocast would change its operands."""
    assert bias is None  # `ChipProduct.adds_bias`
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b, **options)


@private.constant
def is_chip(kind: str, index: int | None) -> bool:
    """Whether a device, given by its type and index, is an H100 or H200."""
    return kind == "cuda" and not _obstacle(torch.device(kind) if index is None else torch.device(kind, index))


@lru_cache(maxsize=64)
def _obstacle(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the operands are on {device.type}, not on an H100 or H200"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != _HOPPER:
        return f"{torch.cuda.get_device_name(device)} is not an H100 or H200"
    return ""


#: The number 1 on each device.
_ones: dict[torch.device, Tensor] = {}


def one_on(device: torch.device) -> Tensor:
    """The number 1 on a device."""
    if device not in _ones:
        _ones.setdefault(device, persistent(1.0, torch.float32, device))
    return _ones[device]
