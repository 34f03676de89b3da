"""The sum of a tensor's bits, from which the seeds of weights are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inputs import DTYPES
from qsim_kernels import reference
from side_by_side import DEVICE, kernels

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "at an odd place": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every other": lambda x: torch.stack([x, 2 * x], 2)[..., 0],
    "channels last": lambda x: x.view(1, 3, -1, x.shape[1]).contiguous(memory_format=torch.channels_last),
    "in another order": lambda x: x.flip(0),
}


def expected(x: Tensor) -> int:
    """The sum in Python's whole numbers."""
    total = sum(x.detach().cpu().contiguous().view(WORDS[x.element_size()]).flatten().tolist())
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (33, 129), (3, 5, 2)], ids=str)
def test_every_element_counts_once(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(device, dtype).requires_grad_()
    found = torch.ops.qsim.checksum(x, 0)
    assert (found.dtype, found.shape, found.device) == (torch.int64, (), x.device)
    assert int(found) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_does_not_depend_on_the_memory_layout(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(33, 129).to(device, dtype)
    other = LAYOUTS[layout](x)
    assert int(torch.ops.qsim.checksum(other, 0)) == int(torch.ops.qsim.checksum(x, 0)) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_elements_than_a_block_has(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(3, 100_001).to(device, dtype)
    assert int(torch.ops.qsim.checksum(x, 0)) == expected(x)
    assert sum(int(torch.ops.qsim.checksum(row, 0)) for row in x) == expected(x), "what shares give adds up"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_against_reference(dtype: torch.dtype, layout: str) -> None:
    words = LAYOUTS[layout](torch.randn(99, 129).to(DEVICE, dtype)).view(WORDS[dtype.itemsize])
    totals = [torch.full((), 5, device=DEVICE), torch.full((), 5, device=DEVICE)]
    reference.add_words(totals[0], words)
    kernels.add_words(totals[1], words)
    assert int(totals[0]) == int(totals[1]) != 5


def test_as_torch_sees_it(device: torch.device) -> None:
    torch.library.opcheck(torch.ops.qsim.checksum.default, (torch.randn(5, 6, device=device, requires_grad=True), 3))
