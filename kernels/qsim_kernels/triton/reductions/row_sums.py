"""Rounding a matrix and summing its rows in one read, for a layer's gradient, whose unrounded sum is the bias's gradient.

A program walks down a few columns and keeps their sums. Partial sums are added in a fixed order, so that every run gives the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.grid import GridRounding, Noise
from qsim_kernels.triton.device.blocks import as_dtype, as_single, rounded
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.parts import Part, block_part, load_part, store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import rounding_of
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.arguments import seed_of
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.quantize.launch import drawn_later_if_faster, quantize_into, run_length

# Enough warps to keep a large GPU busy; more would leave more partial sums to add.
_WARPS = 4224
_LEAST_ROWS = 8
#: Columns, and sums of each, that a program adds up at once in the end.
_ADDED, _DEPTH = 16, 128


@triton.jit
def index(row, columns, column):
    """The index of an element, which the compiler must know is a multiple of eight, or threads would read one element at a time."""
    return tl.multiple_of(row * columns + column, 8)


@triton.jit
def walk_down(
    x, out, sums, column, first, end, columns, rounding,
    ROUNDING: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Round some rows of a block of columns."""
    block = block_part(column, columns, BLOCK, MASKED)
    total = tl.zeros([BLOCK], tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for row in range(first, end):
        start = index(row, columns, column)
        part = Part(start, block.places, block.inside, start)
        values = as_single(load_part(x, part))
        total += values
        drawn = random_integers(rounding.noise, start, ROUNDING, RUN, True, BLOCK)
        result = rounded(values, drawn, rounding.grid, ROUNDING, out.dtype.element_ty == tl.float32)
        store_part(out, as_dtype(result, out.dtype.element_ty), part)
    store_part(sums, total, block)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def quantize_and_sum_kernel(
    x, out, sums, seed_pointer, seed: tl.int64, noise_stream: tl.int64, rows: tl.int64, columns: tl.int64, depth: tl.int64,
    numbers: RoundingNumbers, ROUNDING: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round a matrix; `sums` gets one row of sums per `depth` rows."""
    rounding = rounding_of(seed_pointer, seed, noise_stream, numbers, ROUNDING.wide)
    across = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    column, part = program % across * BLOCK, program // across
    first = part * depth
    end = tl.minimum(first + depth, rows)
    sums += index(part, columns, 0)
    if column + BLOCK <= columns:
        walk_down(x, out, sums, column, first, end, columns, rounding, ROUNDING, RUN, BLOCK, False)
    else:
        walk_down(x, out, sums, column, first, end, columns, rounding, ROUNDING, RUN, BLOCK, True)


@triton.jit(do_not_specialize=["columns", "parts"])
def add_parts_kernel(sums, out, columns: tl.int64, parts: tl.int64, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the rows of `sums`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([DEPTH, BLOCK], sums.dtype.element_ty)
    for first in range(0, parts, DEPTH):
        row = first + tl.arange(0, DEPTH)
        at = row[:, None] * columns + place[None, :]
        total += tl.load(sums + at, mask=(row < parts)[:, None] & (place < columns)[None, :], other=0)
    tl.store(out + place, tl.sum(total, axis=0), mask=place < columns)


def quantize_and_sum_into(out: Tensor, x: Tensor, rounding: GridRounding, noise: Noise) -> Tensor:
    """Round the matrix `x` onto a grid, into `out`; see `reference.quantize_and_sum_into`."""
    seed, stream, _ = noise
    pointer, number = seed_of(seed, x)
    form = _prepared(rounding, x.shape, x.dtype, out.dtype, pointer is None)
    if form is None:
        # Rows that do not begin where random bits begin would need separate bits for each element.
        quantize_into(out, x, rounding, noise)
        return x.sum(0, dtype=_kind(x.dtype))
    round_, add, parts, kind = form
    sums = torch.empty((parts, x.shape[1]), dtype=kind, device=x.device)
    round_(x.contiguous(), out, sums, pointer, number, stream)
    if parts == 1:
        return sums.view(-1)
    total = torch.empty(x.shape[1], dtype=kind, device=x.device)
    add(sums, total)
    return total


def _kind(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=4096)
def _prepared(
    rounding: GridRounding, shape: torch.Size, source: torch.dtype, target: torch.dtype, unseeded: bool
) -> tuple[Launch, Launch, int, torch.dtype] | None:
    """The launches of rounding and of adding up, how many sums a column has, and their dtype; none if rows begin within Philox blocks."""
    rows, columns = shape
    if columns % 8 or not rows * columns:
        return None
    block = next((size for size in (1024, 512) if columns % size == 0), 256)
    across = -(-columns // block)
    depth = max(_LEAST_ROWS, -(-rows * across * _warps(block) // _WARPS))
    parts, kind = -(-rows // depth), _kind(source)
    variant, numbers = arguments.rounding(rounding, torch.float64 in (source, target))
    variant = drawn_later_if_faster(variant, rounding.grid, source)
    constants, options = (variant, run_length(source, target), block), {"num_warps": _warps(block), "maxnreg": 64}
    round_ = launcher(quantize_and_sum_kernel, (source, target, unseeded), *numbers, *constants, **options)
    add = launcher(add_parts_kernel, (kind,), _DEPTH, _ADDED)
    return Launch(round_, parts * across, (rows, columns, depth)), Launch(add, -(-columns // _ADDED), (columns, parts)), parts, kind


def _warps(block: int) -> int:
    return block // 256
