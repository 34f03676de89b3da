"""Many tensors in one launch: a table of their addresses on the device, and which program works on which part of which.

Both are kept as long as they are in use: the table hangs on addresses, of which gradients tend to have the same in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.triton.updates import COLUMNS, FACTORS, KEYS

#: Tables that are kept: as many as groups of parameters may take turns.
_KEPT = 64


class Table(NamedTuple):
    """What kernels find tensors by.

    Attributes:
        host: The addresses on the host, which must stay while a copy to the device may be replayed.
        device: The same on the device.
        factors: Room for the numbers of a step.
        keys: Room for the keys of its random bits.
        smooth: Which parameters can be read in wide accesses, with elements that follow one another in the whole.
    """

    host: Tensor
    device: Tensor
    factors: Tensor
    keys: Tensor
    smooth: tuple[bool, ...]


_tables: OrderedDict[Hashable, Table] = OrderedDict()
# What a CUDA graph was captured with must stay as long as it may be replayed, which nothing tells.
_captured: list[Table] = []


def table_of(columns: Sequence[Sequence[Tensor]], counts: tuple[int, ...], streams: Sequence[int], places: Sequence[int]) -> Table:
    """The table of tensors in these columns: parameters, gradients and so on, as many in each, or none.

    Args:
        columns: Contiguous tensors.
        counts: How many elements the parameters have.
        streams: See `reference.updates.update`.
        places: See `reference.updates.update`.
    """
    device = columns[0][0].device
    addresses = tuple(tuple(map(Tensor.data_ptr, column)) for column in columns)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    key = (device, addresses, counts, tuple(streams), tuple(places))
    table = None if capturing else _tables.get(key)
    if table is None:
        table = _write(addresses, counts, streams, places, device)
        if capturing:
            _captured.append(table)
        else:
            _tables[key] = table
            if len(_tables) > _KEPT:
                _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return table


def _write(
    addresses: tuple[tuple[int, ...], ...], counts: tuple[int, ...], streams: Sequence[int], places: Sequence[int], device: torch.device
) -> Table:
    tensors = len(counts)
    rows = [[0] * tensors if not column else list(column) for column in addresses]
    offsets, widths, strides = places[0::3], places[1::3], places[2::3]
    smooth = tuple(
        not any(address % 16 for address in row) and not width and offset % 8 == 0
        for offset, width, *row in zip(offsets, widths, *rows[:6], strict=True)
    )
    unused = [0] * tensors
    columns = [*rows, counts, offsets, widths, strides, streams]
    columns += [unused] * (COLUMNS.value - len(columns))
    host = torch.tensor(list(chain.from_iterable(zip(*columns, strict=True))), dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        host = host.pin_memory()
    factors = torch.empty(tensors * FACTORS.value, dtype=torch.float32, device=device)
    keys = torch.empty(tensors * KEYS.value, dtype=torch.int64, device=device)
    return Table(host, host.to(device, non_blocking=True), factors, keys, smooth)


@lru_cache(maxsize=64)
def work_of(counts: tuple[int, ...], smooth: tuple[bool, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each program the tensor and the number of the block that it works on: of full blocks in smooth tensors, and of all others."""
    count = torch.tensor(counts, dtype=torch.int64, device="cpu")
    full = torch.where(torch.tensor(smooth, device="cpu"), count // block, 0)
    return _blocks(torch.zeros_like(full), full).to(device), _blocks(full, (count + block - 1) // block).to(device)


def _blocks(begin: Tensor, end: Tensor) -> Tensor:
    """Pairs of a tensor and of the number of one of its blocks, from one number to another."""
    blocks = end - begin
    tensor = torch.repeat_interleave(torch.arange(len(blocks), device="cpu"), blocks)
    first = (blocks.cumsum(0) - blocks - begin)[tensor]
    return torch.stack([tensor, torch.arange(len(tensor), device="cpu") - first], dim=1).to(torch.int32)
