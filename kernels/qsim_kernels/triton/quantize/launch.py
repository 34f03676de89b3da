"""Launches from the operators' arguments: which kernel, with which numbers, on how many blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim_kernels import torch as reference
from qsim_kernels.numbers.carrier import counts_wide
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import Coding, Grid, GridRounding, Mode, Noise, Rule
from qsim_kernels.triton.device.parts import Blocks, TransposedTile
from qsim_kernels.triton.device.values import CodeVariant, KernelVariant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.arguments import seed_of
from qsim_kernels.triton.host.launcher import Launcher, launcher
from qsim_kernels.triton.host.layouts import ElementOrder, in_order, prepared
from qsim_kernels.triton.quantize.kernels import (
    column_pairs_kernel,
    decode_kernel,
    encode_kernel,
    quantize_and_encode_kernel,
    quantize_kernel,
)

#: The most bits of a code that kernels write and read: wider ones are float64's, which need no kernel.
_KERNEL_BITS = 32


def quantize_into(out: Tensor, x: Tensor, rounding: GridRounding, noise: Noise, block: int | None = None) -> None:
    """Round `x` onto a grid, into `out`; see `reference.quantize_into`.

    Args:
        out: Of `x`'s shape, in a dtype that holds the grid.
        x: Values.
        rounding: How to round.
        noise: The random bits.
        block: Elements of a block; by default the fastest number.
    """
    seed, stream, offset = noise
    pointer, number = seed_of(seed, x)
    aligned = offset % 8 == 0
    is_word_aligned = (x.data_ptr() | out.data_ptr()) % 4 == 0
    form = (rounding, (x.dtype, out.dtype), pointer is None, aligned, is_word_aligned, block)
    launch = prepared(_quantizer, form, _order(rounding.rule, aligned), x.shape, x.stride(), out.stride())
    if launch is None:
        in_order(lambda source, target: quantize_into(target, source, rounding, noise, block), x, out)
        return
    launch(x, out, pointer, number, stream, offset)


def encode_into(out: Tensor, x: Tensor, encoding: Encoding, noise: Noise, check: bool = True, block: int | None = None) -> Tensor | bool:
    """Round `x` onto a grid and write the codes into `out`; see `reference.encode_into`.

    Returns:
        Whether there was a NaN without a code, on the device of `x`.
    """
    if encoding.coding.bits > _KERNEL_BITS:
        return reference.encode_into(out, x, encoding, noise, check)
    check, (seed, stream, offset) = check and encoding.coding.nan < 0, noise
    pointer, number = seed_of(seed, x)
    aligned = offset % 8 == 0
    form = (encoding, (x.dtype, out.dtype), pointer is None, aligned, check, block)
    launch = prepared(_encoder, form, _order(encoding.rule, aligned), x.shape, x.stride(), out.stride())
    if launch is None:
        return in_order(lambda source, target: encode_into(target, source, encoding, noise, check, block), x, out)
    lost = torch.zeros((), dtype=torch.int32, device=x.device) if check else None
    launch(x, out, lost, pointer, number, stream, offset)
    return False if lost is None else lost


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding, block: int | None = None) -> None:
    """Write the values of `codes` into `out`; see `reference.decode_into`, which looks up those of a table."""
    if grid.table or coding.bits > _KERNEL_BITS:
        reference.decode_into(out, codes, grid, coding)
        return
    form = (grid, coding, (codes.dtype, out.dtype), block)
    launch = prepared(_decoder, form, ElementOrder.ANY, codes.shape, codes.stride(), out.stride())
    if launch is None:
        in_order(lambda source, target: decode_into(target, source, grid, coding, block), codes, out)
        return
    launch(codes, out)


def quantize_and_encode_into(
    out: Tensor, codes: Tensor, x: Tensor, rounding: GridRounding, noise: Noise, encoding: Encoding, code_noise: Noise
) -> None:
    """Round `x` onto two grids, into values and into codes; see `reference.quantize_and_encode_into`."""
    (seed, stream, _), (_, code_stream, _) = noise, code_noise
    pointer, number = seed_of(seed, x)
    order = max(_order(rounding.rule, True), _order(encoding.rule, True))
    form = (rounding, encoding, (x.dtype, out.dtype, codes.dtype), pointer is None)
    launch = prepared(_both, form, order, x.shape, x.stride(), out.stride(), codes.stride())
    if launch is None:
        others = (rounding, noise, encoding, code_noise)
        in_order(lambda source, target, written: quantize_and_encode_into(target, written, source, *others), x, out, codes)
        return
    launch(x, out, codes, pointer, number, stream, code_stream)


def _order(rule: Rule, aligned: bool) -> ElementOrder:
    """The order in which a rounding counts elements, the first of which begins a group of random bits if it is aligned."""
    if rule.mode != Mode.STOCHASTIC:
        return ElementOrder.ANY
    return ElementOrder.GROUPS if aligned else ElementOrder.INDEX


def _quantizer(
    rounding: GridRounding,
    dtypes: tuple[torch.dtype, ...],
    unseeded: bool,
    aligned: bool,
    is_word_aligned: bool,
    block: int | None,
    tile: TransposedTile | None,
) -> Launcher:
    variant, numbers = arguments.rounding(rounding, torch.float64 in dtypes)
    source, target = dtypes
    if is_word_aligned and dtypes == (torch.bfloat16, torch.bfloat16) and tile is not None and tile.aligned and tile.even:
        late = arguments.drawn_later(variant, rounding.grid, few_bits=True)
        if arguments.has_column_pairs(late, rounding.grid):
            return launcher(column_pairs_kernel, (dtypes, unseeded), *numbers, late, tile, num_warps=1)
    run, steps = run_length(source, target), 1
    is_plain = aligned and not variant.wide and tile is None
    if is_plain:
        variant = drawn_later_if_faster(variant, rounding.grid, source)
    draws_words = is_plain and variant.mode == Mode.STOCHASTIC and not variant.draws_16
    size, warps = 1024 if run == 4 else 2048, 4
    registers = 0
    if variant.draws_late:
        # Several blocks amortize a thread's fixed costs, which matters where there is little to move.
        steps, registers = 4 if target.itemsize == 2 else 1, 64
    elif draws_words:
        # A Philox block has half words for eight neighbours.
        run, size, warps = 8, *((512, 2) if source.itemsize > target.itemsize else (2048, 8) if variant.table else (1024, 4))
    if not registers and is_plain and source.itemsize == target.itemsize and (draws_words or source.itemsize == 2):
        # Where there is little to move, as many threads as fit must share the work.
        registers = 32
    block = block or size
    options = {"maxnreg": registers} if registers else {}
    constants = (variant, Blocks(block, steps, run, aligned), tile)
    return launcher(quantize_kernel, (dtypes, unseeded), *numbers, *constants, share=steps * block, num_warps=warps, **options)


def _encoder(
    encoded: Encoding,
    dtypes: tuple[torch.dtype, ...],
    unseeded: bool,
    aligned: bool,
    checked: bool,
    block: int | None,
    tile: TransposedTile | None,
) -> Launcher:
    (variant, code_variant), numbers = encoding_of(encoded, dtypes[0], may_draw_later=aligned and tile is None)
    in_pairs = dtypes == (torch.bfloat16, torch.uint8) and arguments.has_pairs(variant, code_variant, encoded.grid)
    # Several blocks amortize a thread's fixed costs, which memory traffic would not hide.
    size, steps, warps = (1024, 4, 2) if in_pairs else (2048, 2, 4)
    block = block or size
    if in_pairs:
        variant = variant._replace(in_pairs=True, fills_byte=encoded.coding.bits == 8)
    constants = (variant, code_variant, Blocks(block, steps, run_length(*dtypes), aligned), tile)
    # With more registers too few threads would fit.
    scarce = {"maxnreg": 64} if in_pairs else {}
    return launcher(encode_kernel, (dtypes, unseeded, checked), *numbers, *constants, share=steps * block, num_warps=warps, **scarce)


def _decoder(grid: Grid, coding: Coding, dtypes: tuple[torch.dtype, ...], block: int | None, tile: TransposedTile | None) -> Launcher:
    target = dtypes[1]
    variant, numbers = arguments.reading(grid, coding, target == torch.float64 or counts_wide(grid, coding))
    block = block or 1024
    constants = (variant, Blocks(block, 1, 0, True), tile)
    return launcher(decode_kernel, dtypes, *numbers, *constants, share=block, num_warps=2 if target.itemsize == 2 else 4)


def _both(
    rounding: GridRounding,
    codes: Encoding,
    dtypes: tuple[torch.dtype, ...],
    unseeded: bool,
    tile: TransposedTile | None,
) -> Launcher:
    source, target, _ = dtypes
    variant, numbers = arguments.rounding(rounding, torch.float64 in (source, target))
    if tile is None:
        variant = drawn_later_if_faster(variant, rounding.grid, source)
    (code_rounding, code_variant), code_numbers = encoding_of(codes, source, may_draw_later=tile is None)
    are_fast = all(each.fast and each.saturates for each in (variant, code_rounding))
    one_grid = rounding.grid == codes.grid and are_fast and code_variant.nan
    constants = (variant, code_rounding, code_variant, one_grid, Blocks(2048, 1, run_length(source, target), True), tile)
    # Two grids need so many registers that fewer threads fit.
    scarce = {"maxnreg": 40} if one_grid and source.itemsize == target.itemsize == 2 and tile is None else {}
    return launcher(quantize_and_encode_kernel, (dtypes, unseeded), *numbers, *code_numbers, *constants, share=2048, **scarce)


def encoding_of(encoding: Encoding, source: torch.dtype, may_draw_later: bool) -> tuple[tuple[KernelVariant, CodeVariant], tuple[int, ...]]:
    """The variants and the numbers of a rounding to codes."""
    grid, _, coding = encoding
    variant, numbers = arguments.rounding(encoding.rounding, source == torch.float64 or counts_wide(grid, coding), writes_codes=True)
    code_variant, code_numbers = arguments.writing(grid, coding, variant.wide)
    if may_draw_later:
        variant = drawn_later_if_faster(variant, grid, source)
    return (variant, code_variant), (*numbers, *code_numbers)


def drawn_later_if_faster(variant: KernelVariant, grid: Grid, source: torch.dtype) -> KernelVariant:
    """The variant that draws later, unless so many bytes are moved that drawing all random bits takes no extra time."""
    return arguments.drawn_later(variant, grid, few_bits=True) if significant_bits(source) <= 11 else variant


def run_length(source: torch.dtype, target: torch.dtype) -> int:
    """The number of neighbours a thread holds, so that it reads or writes 16 bytes of the narrower type at once."""
    return max(4, 16 // min(source.itemsize, target.itemsize))


def significant_bits(dtype: torch.dtype) -> int:
    """The number of bits in a dtype's significand."""
    return 2 - math.frexp(torch.finfo(dtype).eps)[1]
