"""Errors of dot products by the accumulator that adds them, against their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import qsim

#: Kinds of operands: E4M3 numbers whose signs cancel or not, and the vectors of Wang et al.
NORMAL, POSITIVE, MEAN_ONE = "normal", "positive", "mean one"
#: Exact sums, whose error is that of rounding the operands to E4M3; and chunks of 64 whose own sums are 16 bits wide as well.
EXACT, WANG = "exact sums", "chunks of 64, e6m9 inside and out"
#: The format of sums in Wang et al., the products in a chunk, and rows and columns of a product, each element of which is one sum.
_SUM, _CHUNK, _SIDE = "Rounded('e6m9')", 64, 32


def errors(operands: str, accumulate: str, lengths: Sequence[int], seed: int, device: torch.device) -> dict[str, Any]:
    """Sums of the first few products of the same vectors, for each of some lengths.

    Returns:
        `error`: the root mean square of errors, and `largest`: the largest, both in units of the root mean square of the exact sums.
        `sum`: the mean of the sums.
    """
    a, b = _vectors(operands, lengths[-1], seed, device)
    rounded_a, rounded_b = (qsim.quantize(x, "e6m9" if operands == MEAN_ONE else "e4m3") for x in (a, b))
    # Exact sums of rounded operands are compared with those of unrounded ones, and all others with exact sums of the same operands.
    true_a, true_b = (a, b) if accumulate == EXACT else (rounded_a, rounded_b)
    found: dict[str, Any] = {"error": [], "largest": [], "sum": []}
    for length in lengths:
        exact = true_a[:, :length].double() @ true_b[:length].double()
        sums = product(rounded_a[:, :length], rounded_b[:length], accumulate).double()
        scale, off = exact.square().mean().sqrt(), sums - exact
        found["error"].append(float(off.square().mean().sqrt() / scale))
        found["largest"].append(float(off.abs().max() / scale))
        found["sum"].append(float(sums.mean()))
    return found


def product(a: Tensor, b: Tensor, accumulate: str) -> Tensor:
    """The product of two matrices, added by an accumulator, exactly, or as `in_chunks`."""
    if accumulate == EXACT:
        return a.double() @ b.double()
    if accumulate == WANG:
        return in_chunks(a, b)
    return qsim.matmul(a, b, accumulate, check=False, formats="e4m3" if accumulate in qsim.accumulators.NAMED else None)


def in_chunks(a: Tensor, b: Tensor) -> Tensor:
    """Sums of chunks of 64 products, and their sum, each a sequential sum in 1-6-9: Figure 3 of Wang et al.

    Example:
        >>> import torch
        >>> in_chunks(torch.ones(1, 4096), torch.ones(4096, 1))
        tensor([[4096.]])
    """
    parts = [qsim.matmul(left, right, _SUM) for left, right in zip(a.split(_CHUNK, 1), b.split(_CHUNK), strict=True)]
    terms = torch.stack(parts, -1)
    return qsim.matmul(terms, terms.new_ones(len(parts), 1), _SUM).squeeze(-1)


def _vectors(operands: str, length: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The operands before rounding: for E4M3 their largest magnitude is that of the format."""
    draw = torch.Generator().manual_seed(seed)
    if operands == MEAN_ONE:
        # Uniform, with a standard deviation of one.
        spread = 2 * 3**0.5
        return torch.ones(1, length).to(device), (1 + spread * (torch.rand(length, _SIDE, generator=draw) - 0.5)).to(device)
    make = torch.randn if operands == NORMAL else torch.rand
    a, b = make(_SIDE, length, generator=draw).to(device), make(length, _SIDE, generator=draw).to(device)
    most = qsim.format("e4m3").max
    return a * (most / a.abs().max()), b * (most / b.abs().max())
