"""Codes of a matrix and of its transpose from one read: a program rounds a tile, and writes it both ways."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.encoding import code_dtype, read_encoding
from qsim_kernels.torch import WantedCodes
from qsim_kernels.triton.device.blocks import as_single, encoded
from qsim_kernels.triton.device.conversions import conversion_of, converted
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.parts import Part, TransposedTile, load_part, store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import Codes, codes_in_carrier, rounding_of
from qsim_kernels.triton.host.arguments import seed_of
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.quantize.launch import encoding_of


@triton.jit
def tile_of_codes(
    values, first, rounding, coding, ROUNDING: tl.constexpr, CODING: tl.constexpr, CONVERSION: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The codes of a tile's values, given the logical index of each row's first element."""
    if CONVERSION is not None:
        return converted(values, CONVERSION)
    else:
        drawn = random_integers(rounding.noise, first, ROUNDING, TILE.run, TILE.aligned, TILE.columns)
        written = codes_in_carrier(coding, rounding.grid.shift, ROUNDING.wide)
        return encoded(as_single(values), drawn, rounding.grid, written, ROUNDING, CODING, True)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def codes_both_ways_kernel(
    x, turned_out, out, seed_pointer, seed: tl.int64, noise_stream: tl.int64, turned_stream: tl.int64, rows: tl.int64, columns: tl.int64,
    numbers: RoundingNumbers, coding: Codes, turned_numbers: RoundingNumbers, turned_coding: Codes,
    ROUNDING: tl.constexpr, CODING: tl.constexpr, TURNED_ROUNDING: tl.constexpr, TURNED_CODING: tl.constexpr,
    CONVERSION: tl.constexpr, TURNED_CONVERSION: tl.constexpr, TILE: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Round a matrix onto two grids, and write the codes of one rounding in place, if wanted, and of the other transposed.

    Args:
        x: The values.
        turned_out: The transposed codes.
        rows: Rows of the matrix.
        columns: Columns.
        out: The codes in place, or None.
        ROUNDING: The `KernelVariant` of their rounding, and `CODING` their `CodeVariant`.
        TURNED_ROUNDING: The same for the transposed codes, and `TURNED_CODING`.
        CONVERSION: The `conversion_of` their values, if there is one, and `TURNED_CONVERSION`.
        TILE: The `TransposedTile`.
        ALIKE: Whether both roundings are the same.
    """
    across = tl.cdiv(columns, TILE.columns).to(tl.int32)
    row = (tl.program_id(0) // across).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE.columns + tl.arange(0, TILE.columns)
    first = row * columns + (tl.program_id(0) % across).to(tl.int64) * TILE.columns
    starts, turned_starts = row * columns, column * rows
    if TILE.whole:
        # Without this the compiler reads and writes single elements.
        starts, turned_starts = tl.multiple_of(starts, [16]), tl.multiple_of(turned_starts, [16])
    places = starts[:, None] + column[None, :]
    turned_places = turned_starts[:, None] + row[None, :]
    if TILE.whole:
        part, turned_part = Part(0, places, True, first), Part(0, turned_places, True, first)
    else:
        part = Part(0, places, (row < rows)[:, None] & (column < columns)[None, :], first)
        turned_part = Part(0, turned_places, (column < columns)[:, None] & (row < rows)[None, :], first)
    values = load_part(x, part)
    turned_rounding = rounding_of(seed_pointer, seed, turned_stream, turned_numbers, TURNED_ROUNDING.wide)
    turned = tile_of_codes(values, first, turned_rounding, turned_coding, TURNED_ROUNDING, TURNED_CODING, TURNED_CONVERSION, TILE)
    turned = turned.to(turned_out.dtype.element_ty)
    if out is not None:
        if ALIKE:
            codes = turned
        else:
            rounding = rounding_of(seed_pointer, seed, noise_stream, numbers, ROUNDING.wide)
            codes = tile_of_codes(values, first, rounding, coding, ROUNDING, CODING, CONVERSION, TILE).to(out.dtype.element_ty)
        store_part(out, codes, part)
    store_part(turned_out, tl.trans(turned), turned_part)


def encode_both_ways(x: Tensor, seed: Tensor | None, codes: WantedCodes | None, turned: WantedCodes) -> tuple[Tensor | None, Tensor]:
    """Round a matrix twice from one read, or once, to codes of at most 16 bits; see `reference.encode_both_ways`."""
    (rows, columns), (turned_rounding, turned_stream, turned_dtype) = x.shape, turned
    rounding, stream, dtype = codes or (None, 0, None)
    pointer, number = seed_of(seed, x)
    form = _form(rounding, turned_rounding, x.dtype, rows, columns, stream == turned_stream, pointer is None)
    if form.draws and seed is None:
        raise ValueError("stochastic rounding needs a seed")
    lines = x.contiguous()
    out = None if form.codes is None else lines.new_empty((rows, columns), dtype=form.codes)
    out_turned = lines.new_empty((columns, rows), dtype=form.turned_codes)
    form.launch(lines, out_turned, out, pointer, number, stream, turned_stream)
    return None if out is None else out.view(dtype or out.dtype), out_turned.view(turned_dtype)


class _Form(NamedTuple):
    """The facts that follow from all arguments of a call but their values.

    Attributes:
        launch: The launch.
        draws: Whether random bits are needed.
        codes: The integers in which codes in place are written, if they are wanted.
        turned_codes: Those of transposed codes.
    """

    launch: Launch
    draws: bool
    codes: torch.dtype | None
    turned_codes: torch.dtype


@lru_cache(maxsize=4096)
def _form(rounding: str | None, turned: str, source: torch.dtype, rows: int, columns: int, one_stream: bool, unseeded: bool) -> _Form:
    other = read_encoding(turned)
    one = other if rounding is None else read_encoding(rounding)
    alike = rounding is None or (rounding == turned and one_stream)
    is_whole = rows % 64 == 0 and columns % 64 == 0
    tile = TransposedTile(64, 64, 16, columns % 8 == 0, is_whole, is_whole)
    codes = None if rounding is None else code_dtype(one.coding.bits)
    turned_codes = code_dtype(other.coding.bits)
    (variants, numbers), (turned_variants, turned_numbers) = (encoding_of(each, source, may_draw_later=True) for each in (one, other))
    conversions = (conversion_of(each, source) for each in (one, other))
    tail = (*numbers, *turned_numbers, *variants, *turned_variants, *conversions, tile, alike)
    run = launcher(codes_both_ways_kernel, (source, codes, turned_codes, unseeded), *tail, num_warps=4)
    programs = -(-rows // tile.rows) * -(-columns // tile.columns)
    return _Form(Launch(run, programs, (rows, columns)), one.is_stochastic or other.is_stochastic, codes, turned_codes)
