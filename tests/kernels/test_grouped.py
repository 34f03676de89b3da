"""The kernels that multiply groups of rows, compared with a product for each group."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from qsim_kernels.triton.grouped import TileShape, grouped_into
from support.side_by_side import DEVICE

#: Small tiles, so that the interpreter meets several of them.
SMALL = TileShape(16, 32, 16, 2, 4, 2)
ENDS = [(5, 5, 40, 70), (0, 0, 0, 0), (0, 77, 77, 77), (1, 33, 50, 77)]


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose products have exact sums, in any order."""
    return torch.randint(-4, 5, shape, device=DEVICE).to(dtype)


def written_out(a: Tensor, b: Tensor, ends: Sequence[int], factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    found = a.new_zeros((len(ends), len(a), b.shape[1]) if b.dim() == 2 else (len(a), b.shape[2]), dtype=dtype)
    for i, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        rows = b.dim() == 3
        product = a[start:end].float() @ b[i].float() if rows else a[:, start:end].float() @ b[start:end].float()
        for factor in factors:
            own = factor[i if len(factor) > 1 else 0]
            product = product * (own[start:end] if rows and len(own) > 1 else own)
        (found[start:end] if rows else found[i]).copy_(product)
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ends", ENDS)
def test_products_of_rows(ends: tuple[int, ...], dtype: torch.dtype) -> None:
    """Matrices are stored by rows or by columns. Rows after the last group become zeros, whatever they hold."""
    a, scales = integers(77, 40, dtype=dtype), torch.rand(4, 77, 56, device=DEVICE)
    a[ends[-1] :] = torch.nan
    for b in (integers(4, 40, 56, dtype=dtype), integers(4, 56, 40, dtype=dtype).mT):
        for factors in ([], [scales[:, :1, :1]], [scales[:1, :, :1], scales[:, :1]]):
            out = torch.full((77, 56), torch.nan, device=DEVICE)
            grouped_into(out, a, b, torch.tensor(ends, dtype=torch.int32, device=DEVICE), factors, SMALL)
            assert torch.equal(out, written_out(a, b, ends, factors, torch.float32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ends", ENDS)
def test_products_of_columns_with_rows(ends: tuple[int, ...]) -> None:
    """A group without rows has zeros, and rows of other groups do not matter."""
    a, b = integers(77, 40, dtype=torch.bfloat16), integers(77, 56, dtype=torch.bfloat16)
    a[ends[-1] :] = torch.nan
    for dtype, factors in ((torch.float32, []), (torch.bfloat16, [torch.rand(4, 40, 1), torch.rand(4, 1, 56)])):
        own = [factor.to(DEVICE) for factor in factors]
        out = torch.full((4, 40, 56), torch.nan, dtype=dtype, device=DEVICE)
        grouped_into(out, a.t(), b, torch.tensor(ends, dtype=torch.int32, device=DEVICE), own, SMALL)
        assert torch.equal(out, written_out(a.t(), b, ends, own, dtype))


@pytest.mark.gpu
def test_large_tiles() -> None:
    ends = (300, 300, 811, 1500)
    a, b, g = (integers(*shape, dtype=torch.bfloat16) for shape in ((1600, 328), (4, 328, 520), (1600, 520)))
    on_device = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    for one, other in ((a, b), (g, b.mT), (a.t(), g)):
        expected = written_out(one, other, ends, [], torch.float32)
        out = torch.full_like(expected, torch.nan)
        grouped_into(out, one, other, on_device, [])
        assert torch.equal(out, expected)
