"""Stochastic rounding of transformed bfloat16 matrices, where a tile is a block of the transform: an override of `tiles`.

A thread holds whole blocks, those of a pair of columns or a run of a row, so that all sums of a transform are its own. It rounds two
elements at a time; see `pairs`. Where blocks run down a matrix, four neighbouring threads share the random words of eight columns.
"""

# mypy: disable-error-code="assignment"
# (Triton unrolls loops in which a tuple grows.)

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.grid import NoiseNumbers
from qsim_kernels.numbers.scales import ScaleNumbers
from qsim_kernels.triton.device.pairs import larger_pair
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, in_memory, region_place
from qsim_kernels.triton.device.scaled_pairs import pair_of, rounded_quotients
from qsim_kernels.triton.device.tile_scales import scale_numbers, tile_scales
from qsim_kernels.triton.device.transforms import (
    bounded,
    exists,
    flips_of,
    largest_of,
    pairs_of_rows,
    singles,
    transformed,
    transformed_rows,
)
from qsim_kernels.triton.device.values import rounding_of
from qsim_kernels.triton.scaled.pairs import first_pair
from qsim_kernels.triton.scaled.tiles import restoring_factors


@triton.jit
def pairs_of_runs(x, inside, PAIRS: tl.constexpr):
    """Load the pairs of runs, a tuple: four at once, which is as much as a thread can."""
    pairs = ()
    for first in tl.static_range(0, PAIRS, 4):
        four = tl.load((x + first)[:, None] + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0)
        even, odd = tl.split(tl.reshape(four, (four.shape[0], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        pairs += (a, b, c, d)
    return pairs


@triton.jit
def store_rows(out, pairs, columns, inside, ROWS: tl.constexpr, filled=None):
    """Write what `pairs_of_rows` reads."""
    for row in tl.static_range(ROWS):
        tl.store(out, pairs[row], mask=exists(row, inside, filled))
        out += columns


@triton.jit
def store_runs(out, pairs, inside, PAIRS: tl.constexpr):
    """Write what `pairs_of_runs` reads."""
    for first in tl.static_range(0, PAIRS, 4):
        even, odd = tl.join(pairs[first], pairs[first + 2]), tl.join(pairs[first + 1], pairs[first + 3])
        four = tl.reshape(tl.join(even, odd), (pairs[first].shape[0], 4))
        tl.store((out + first)[:, None] + tl.arange(0, 4)[None, :], four, mask=inside[:, None])


@triton.jit
def exceed(pairs, LIMIT: tl.constexpr):
    """Whether a magnitude of some pairs has a pattern above a limit."""
    largest = pairs[0]
    for i in tl.static_range(1, len(pairs)):
        largest = larger_pair(largest, pairs[i])
    return tl.max(tl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF), axis=0) > LIMIT


@triton.jit
def interleaved(first, second):
    """The elements of two tuples in turn."""
    values = ()
    for i in tl.static_range(len(first)):
        values += (first[i], second[i])
    return values


@kernel(do_not_specialize_on_alignment=["seed_pointer", "under", "held"])
def turned_kernel(
    x, out, under, held, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, apart: tl.int64,
    numbers: RoundingNumbers, making: ScaleNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr,
    RESTORE: tl.constexpr, FORM: tl.constexpr, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Round transformed matrices under the scales of their blocks; see `tiles_kernel`. Columns are counted in pairs."""
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    making = scale_numbers(making, SCALE_ROUNDING)
    at = region_place(tl.program_id(0), matrices, REGION)
    if under is not None:
        under += at.matrix * apart
    PAIRS: tl.constexpr = (1 << TURN.levels) if TURN.down else (1 << TURN.levels) // 2
    EACH: tl.constexpr = 1 if TURN.down else PAIRS
    # 32-bit places within a region: 64-bit ones would take more instructions.
    place, bounds = in_memory(at, matrices, held, REGION)
    start, filled = first_pair(place, bounds), None if held is None else (bounds.rows - place.row).to(tl.int32)
    thread, columns = tl.arange(0, REGION.width // EACH), matrices.columns.to(tl.int32)
    inside = thread < ((matrices.columns - at.column) // EACH).to(tl.int32)
    given = x.to(tl.pointer_type(tl.int32)) + start + thread * EACH
    target = out.to(tl.pointer_type(tl.int32)) + start + thread * EACH
    if TURN.down:
        pairs = pairs_of_rows(given, columns, inside, PAIRS, filled)
    else:
        pairs = pairs_of_runs(given, inside, PAIRS)
    flips = flips_of(signs, PAIRS)
    first, second = singles(pairs, flips, 0), singles(pairs, flips, 1)
    if not TURN.bounded:
        LARGEST: tl.constexpr = 3.4028234663852886e38 / (1 << TURN.levels)
        if exceed(pairs, 0x7F7F - (TURN.levels << 7)):
            first, second = bounded(first, LARGEST), bounded(second, LARGEST)
    if TURN.down:
        first, second = transformed_rows(first, filled, TURN.factor), transformed_rows(second, filled, TURN.factor)
        values, amax, other = interleaved(first, second), largest_of(first), largest_of(second)
    else:
        values = transformed(interleaved(first, second), TURN.factor)
        amax = largest_of(values)
        other = amax
    scales, inverses = tile_scales(amax, under, making, MAKING, SCALE_ROUNDING)
    others, other_inverses = scales, inverses
    if TURN.down:
        others, other_inverses = tile_scales(other, under, making, MAKING, SCALE_ROUNDING)
    if FORM.multiplies_pairs:
        factors = (pair_of(scales, others),)
    else:
        factors = restoring_factors(scales, under, RESTORE), restoring_factors(others, under, RESTORE)
    block = (source.offset >> 3) + (first_pair(at, matrices) >> 2) + (thread * EACH >> 2)
    result = ()
    for four in tl.static_range(PAIRS // 4):
        quotients = ()
        for i in tl.static_range(8 * four, 8 * four + 8, 2):
            quotients += (values[i] * inverses, values[i + 1] * other_inverses)
        # Threads of a quad draw for a row each.
        own = block + ((4 * four + (thread & 3)) * (columns >> 2) if TURN.down else four)
        result += rounded_quotients(quotients, own, rounding.noise, factors, rounding.grid, TEXT, CONSTRAINTS)
    if TURN.down:
        store_rows(target, result, columns, inside, PAIRS, filled)
    else:
        store_runs(target, result, inside, PAIRS)
