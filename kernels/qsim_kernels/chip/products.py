"""The sums that an H100's or H200's own products have: which description belongs to which product of torch's library."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from qsim_kernels.numbers.grid import Mode
from qsim_kernels.numbers.sums import CHUNK_SUM, SINGLE_GRID, AlignedSum, PromotedSum, Sum

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
        if self.is_fp8 and (length % _MULTIPLE or columns % _MULTIPLE):
            sizes = f"got {length} and {columns}"
            return f"its FP8 products need multiples of {_MULTIPLE} along the sum and as the number of columns, {sizes}"
        return ""


@lru_cache(maxsize=1024)
def product_of(how: Sum) -> ChipProduct | None:
    """The product that adds like a description on an H100 or H200, if there is one.

    Example:
        >>> from qsim_kernels.chip.products import product_of
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
