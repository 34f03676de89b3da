"""Tensors that the loops on a CPU take in their order in memory, without copies, where nothing depends on the order of elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

stored = pytest.importorskip("qsim_kernels.numba.arguments", reason="needs numba")

DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "one column": lambda x: x[..., :1].contiguous().mT,
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other column": lambda x: x[..., ::2],
    "window": lambda x: x[:, 1:, 1:],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture
def images() -> Tensor:
    """Two images of 4 × 5 numbers in three channels."""
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layout", DENSE)
def test_dense_tensors_are_views_in_the_order_of_memory(images: Tensor, layout: str) -> None:
    x = DENSE[layout](images)
    out = torch.empty_like(x)
    for whole, view in zip((out, x), stored.in_memory_order(out, x), strict=True):
        assert view.is_contiguous()
        assert view.data_ptr() == whole.data_ptr()
        assert view.numel() == whole.numel()


@pytest.mark.parametrize("layout", OTHERS)
def test_others_stay_as_they_are(images: Tensor, layout: str) -> None:
    x = OTHERS[layout](images)
    assert all(left is right for left, right in zip(stored.in_memory_order(x, x), (x, x), strict=True))


def test_tensors_that_lie_differently_stay_as_they_are(images: Tensor) -> None:
    other = DENSE["channels last"](images)
    assert stored.in_memory_order(images, other) == (images, other)
