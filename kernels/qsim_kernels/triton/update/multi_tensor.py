"""Many tensors in one launch: a device table of their addresses, and an assignment of tensor parts to programs.

Both are cached: the table depends on addresses, which tend to be the same for gradients in every step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qsim_kernels.numbers.updates import UpdateTensors, check_dtypes
from qsim_kernels.torch.recent import Recent

#: Columns of the table of tensors: addresses, then numbers.
COLUMNS: tl.constexpr = tl.constexpr(16)
GRAD, FIRST, SECOND, LARGEST, COMPENSATION, STEP, PRODUCTS, COUNT, OFFSET, ROW, STRIDE, STREAM = map(tl.constexpr, range(1, 13))

#: Room for the factors of a tensor, in the order of `updates.Factors`, and for the keys of its random bits.
FACTORS: tl.constexpr = tl.constexpr(16)
KEYS: tl.constexpr = tl.constexpr(8)


@triton.jit
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table of tensors."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        # Attached to the conversion itself: the compiler would lose it on any later value.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def addresses(row, PARAM: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """The addresses of one parameter's tensors, null for absent ones; if they are aligned, accesses are wide."""
    return UpdateTensors(
        address(row, 0, PARAM, ALIGNED), address(row, GRAD, GRADIENT, ALIGNED), address(row, FIRST, MOMENT, ALIGNED),
        address(row, SECOND, MOMENT, ALIGNED), address(row, LARGEST, MOMENT, ALIGNED), address(row, COMPENSATION, PARAM, ALIGNED),
    )  # fmt: skip


# The number of columns with addresses of tensors that have as many elements as the parameter.
_ADDRESSES = COMPENSATION.value + 1

#: Cached tables: as many as the groups of parameters that may take turns.
_KEPT = 64


class AddressTable(NamedTuple):
    """The table by which kernels find tensors.

    Attributes:
        host: The addresses on the host, which must stay alive while a copy to the device may be replayed.
        device: The addresses on the device.
        factors: Room for the numbers of a step.
        keys: Room for the keys of its random bits.
        smooth: Which parameters allow wide accesses, with elements that are consecutive in the whole tensor.
    """

    host: Tensor
    device: Tensor
    factors: Tensor
    keys: Tensor
    smooth: tuple[bool, ...]


_tables: Recent[Hashable, AddressTable] = Recent(_KEPT)


class Captured:
    """Tensors that CUDA graphs read in each replay, kept alive while the parameters are that the graphs update."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: list[tuple[StorageWeakRef, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, parameter: Tensor, tensors: tuple[Any, ...]) -> None:
        """Keep tensors as long as a parameter's memory; drop those of memory that is gone."""
        with self._lock:
            self._kept = [(owner, kept) for owner, kept in self._kept if not owner.expired()]
            self._kept.append((StorageWeakRef(parameter.untyped_storage()), tensors))


_captured = Captured()


def table_of(columns: Sequence[Sequence[Tensor]], counts: tuple[int, ...], streams: Sequence[int], places: Sequence[int]) -> AddressTable:
    """The table of tensors in the given columns: parameters, gradients and so on, each column equally long or empty.

    Args:
        columns: Contiguous tensors, each column of one dtype.
        counts: Number of elements of each parameter.
        streams: See `updates.Step`.
        places: See `updates.Step`.
    """
    device = columns[0][0].device
    addresses = tuple(tuple(map(Tensor.data_ptr, column)) for column in columns)
    capturing = _is_capturing(device)
    # Another stream must not find a table before this stream has written it.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, addresses, counts, tuple(streams), tuple(places))
    table = None if capturing else _tables.get(key)
    if table is None:
        check_dtypes(columns)
        table = _write(addresses, counts, streams, places, device)
        if capturing:
            _captured.keep(columns[0][0], table)
        else:
            _tables.put(key, table)
    return table


def _write(
    addresses: tuple[tuple[int, ...], ...], counts: tuple[int, ...], streams: Sequence[int], places: Sequence[int], device: torch.device
) -> AddressTable:
    tensors = len(counts)
    none = (0,) * tensors
    columns = [*(column or none for column in addresses), counts, places[0::3], places[1::3], places[2::3], streams]
    columns += [none] * (COLUMNS.value - len(columns))
    # An array, because torch is slow with long lists.
    values = torch.frombuffer(array("q", chain.from_iterable(columns)), dtype=torch.int64).view(COLUMNS.value, tensors)
    is_aligned = (values[:_ADDRESSES] % 16 == 0).all(0)
    smooth = is_aligned & (values[ROW.value] == 0) & (values[OFFSET.value] % 8 == 0)
    host = _pinned(values.t().contiguous())
    factors = torch.empty(tensors * FACTORS.value, dtype=torch.float32, device=device)
    keys = torch.empty(tensors * KEYS.value, dtype=torch.int64, device=device)
    return AddressTable(host, host.to(device, non_blocking=True), factors, keys, tuple(smooth.tolist()))


def work_of(params: Sequence[Tensor], counts: tuple[int, ...], smooth: tuple[bool, ...], block: int) -> tuple[Tensor, Tensor]:
    """The tensor and the block number for each program: for full blocks of smooth tensors, and for all other blocks."""
    device = params[0].device
    if not _is_capturing(device):
        return _kept_work(counts, smooth, block, device)
    hosts = [_pinned(pairs) for pairs in _work(counts, smooth, block)]
    full, rest = (host.to(device, non_blocking=True) for host in hosts)
    _captured.keep(params[0], (*hosts, full, rest))
    return full, rest


@lru_cache(maxsize=64)
def _kept_work(counts: tuple[int, ...], smooth: tuple[bool, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    full, rest = _work(counts, smooth, block)
    return full.to(device), rest.to(device)


def _work(counts: tuple[int, ...], smooth: tuple[bool, ...], block: int) -> tuple[Tensor, Tensor]:
    count = torch.tensor(counts, dtype=torch.int64, device="cpu")
    full = torch.where(torch.tensor(smooth, device="cpu"), count // block, 0)
    return _blocks(torch.zeros_like(full), full), _blocks(full, (count + block - 1) // block)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pinned(x: Tensor) -> Tensor:
    """Move to pinned memory for asynchronous copies, if there is a device that supports it."""
    return x.pin_memory() if torch.cuda.is_available() else x


def _blocks(begin: Tensor, end: Tensor) -> Tensor:
    """Pairs of a tensor and one of its block numbers, from one number to another."""
    blocks = end - begin
    tensor = torch.repeat_interleave(torch.arange(len(blocks), device="cpu"), blocks)
    first = (blocks.cumsum(0) - blocks - begin)[tensor]
    return torch.stack([tensor, torch.arange(len(tensor), device="cpu") - first], dim=1).to(torch.int32)
