"""The checksum of a tensor's bits, from which the seeds of weights are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qsim_kernels import torch as reference
from support.inputs import DTYPES
from support.side_by_side import DEVICE, kernels

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "at an odd place": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every other": lambda x: torch.stack([x, 2 * x], 2)[..., 0],
    "channels last": lambda x: x.view(1, 3, -1, x.shape[1]).contiguous(memory_format=torch.channels_last),
}


def expected(x: Tensor, offset: int = 0) -> int:
    """The sum in Python's integers."""
    words = x.detach().cpu().contiguous().view(WORDS[x.element_size()]).flatten().tolist()
    return sum(mixed(word, index, x.element_size() == 8) for index, word in enumerate(words, offset))


def mixed(word: int, index: int, is_wide: bool) -> int:
    """The contribution of one element: two rounds of multiplication and shift, of its bits and its index."""
    h = (word ^ (word >> 32) * 0x27D4EB2F) if is_wide else word
    h = (h ^ (index + (index >> 32) * 0x27D4EB2F) * 0x9E3779B1) % 2**32
    for factor, shift in ((0x85EBCA6B, 15), (0xC2B2AE35, 16)):
        h = h * factor % 2**32
        h ^= h >> shift
    return h


def checksum(x: Tensor, start: int = 0, offset: int = 0, row: int = 0, stride: int = 0) -> int:
    return int(torch.ops.qsim.checksum(x, start, offset, row, stride))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (33, 129), (3, 5, 2)], ids=str)
def test_every_element_counts_once(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(device, dtype).requires_grad_()
    found = torch.ops.qsim.checksum(x, 0, 0, 0, 0)
    assert (found.dtype, found.shape, found.device) == (torch.int64, (), x.device)
    assert int(found) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_does_not_depend_on_the_memory_layout(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(33, 129).to(device, dtype)
    other = LAYOUTS[layout](x)
    assert checksum(other) == checksum(x) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_of_shards_add_up(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(3, 100_001).to(device, dtype)
    whole = checksum(x, 7)
    assert sum(checksum(row, 7 if i == 0 else 0, i * 100_001) for i, row in enumerate(x)) == whole
    columns = [x[:, :99], x[:, 99:70_000], x[:, 70_000:]]
    starts = (0, 99, 70_000)
    assert 7 + sum(checksum(part, 0, first, part.shape[1], 100_001) for first, part in zip(starts, columns, strict=True)) == whole


def test_indices_beyond_32_bits(device: torch.device) -> None:
    x = torch.randn(5, device=device)
    assert checksum(x, 0, 2**33 + 1) == expected(x, 2**33 + 1) != checksum(x, 0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_change_shows(device: torch.device, dtype: torch.dtype) -> None:
    # A step that changes few elements, each by one unit in its last place, up or down: their plain sum would often stay the same.
    x = torch.randn(64, 64).to(device, dtype)
    words = x.view(WORDS[x.element_size()])
    seen = {checksum(x)}
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        places = torch.randperm(4096, generator=generator)[:4]
        words.view(-1)[places.to(device)] += (2 * torch.randint(2, (4,), generator=generator) - 1).to(words)
        seen.add(checksum(x))
    assert len(seen) == 201
    swapped = x.clone()
    swapped[3, 4], swapped[5, 6] = x[5, 6], x[3, 4]
    assert checksum(swapped) != checksum(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_against_reference(dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(99, 129).to(DEVICE, dtype))
    for place in ((), (2**40 + 3,), (5, 43, 1000)):
        assert int(reference.checksum(x, 5, *place)) == int(kernels.checksum(x, 5, *place)) != 5


def test_large_tensors_take_several_programs() -> None:
    x = torch.randn((1 << 16) + 77).to(DEVICE, torch.bfloat16)
    assert int(reference.checksum(x, 5, 1, 43, 1000)) == int(kernels.checksum(x, 5, 1, 43, 1000))


def test_as_torch_sees_it(device: torch.device) -> None:
    torch.library.opcheck(torch.ops.qsim.checksum.default, (torch.randn(5, 6, device=device, requires_grad=True), 3, 0, 0, 0))
