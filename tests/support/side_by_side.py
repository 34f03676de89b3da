"""The reference and the Triton kernels on the same inputs: compiled on a GPU, otherwise on the CPU through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim import rounding as roundings
from qsim.formats import Format
from qsim_kernels import Rule, torch as reference
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import GridRounding
from support import covering, inputs
from support.covering import T

pytest.importorskip("triton")

from qsim_kernels import triton as kernels
from support import interpreter

interpreter.speed_up()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: The interpreter's time depends on blocks more than on elements: one block there, if it is not larger; on a GPU the kernels' own choice.
LARGEST_BLOCK = None if DEVICE.type == "cuda" else 1 << 16


def rule(rounding: str | roundings.Rounding, overflow: str) -> Rule:
    """A rounding as the numbers that kernels take."""
    return roundings.resolve(rounding).rule(overflow)


def difficult(fmt: Format, dtype: torch.dtype) -> Tensor:
    """Thousands of difficult numbers, in an order unrelated to the noise; their count is odd."""
    parts = [inputs.edges(fmt, dtype, count=96), inputs.random_patterns(dtype, 512, seed=2)]
    if dtype == torch.float64 and fmt.precision <= 23:
        parts.append(inputs.double_rounding(fmt, count=96))
    x = torch.cat(parts)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    return x[: len(x) - 1 + len(x) % 2].to(DEVICE)


def seed(number: int = 1234567890123) -> Tensor:
    """A seed as the operators pass it."""
    return torch.tensor(number)


def options(module: Any, count: int) -> dict[str, int]:
    """Additional arguments of the kernels: in the interpreter the block size, for one block if there are not too many elements."""
    if module is not kernels or LARGEST_BLOCK is None:
        return {}
    return {"block": min(LARGEST_BLOCK, max(256, 1 << (count - 1).bit_length()))}


def dealt(items: Sequence[T], turn: int, hands: int) -> Sequence[T]:
    """The share of `covering.dealt` in the interpreter; on a GPU, where launches are cheap, all items at every turn."""
    return items if DEVICE.type == "cuda" else covering.dealt(items, turn, hands)


def both_quantized(
    x: Tensor, fmt: Format, how: Rule, dtype: torch.dtype | None = None, number: int = 3**25, stream: int = 5, offset: int = 16
) -> tuple[Tensor, Tensor]:
    """Round with the reference and with the kernels."""
    results = []
    for module in (reference, kernels):
        out = torch.full_like(x, 77, dtype=dtype)
        module.quantize_into(out, x, GridRounding(fmt.grid, how), (seed(number), stream, offset), **options(module, x.numel()))
        results.append(out)
    return results[0], results[1]


def both_encoded(x: Tensor, fmt: Format, how: Rule) -> tuple[Tensor, Tensor, bool, bool]:
    """Round and encode with the reference and with the kernels; and whether they report a lost NaN."""
    results, lost = [], []
    for module in (reference, kernels):
        out = torch.full_like(x, 77, dtype=inputs.code_dtype(fmt))
        lost.append(
            bool(module.encode_into(out, x, Encoding(fmt.grid, how, fmt.coding), (seed(), 5, 16), **options(module, x.numel() // 2)))
        )
        results.append(out)
    return results[0], results[1], lost[0], lost[1]


def both_decoded(codes: Tensor, fmt: Format, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode codes with the reference and with the kernels."""
    results = []
    for module in (reference, kernels):
        out = torch.full_like(codes, 77, dtype=dtype)
        module.decode_into(out, codes, fmt.grid, fmt.coding, **options(module, codes.numel()))
        results.append(out)
    return results[0], results[1]
