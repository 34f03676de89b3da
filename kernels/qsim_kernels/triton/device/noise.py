"""Random bits inside a kernel: Philox4x32-10 on the logical index, one call per 16 bits of eight elements."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import philox, random_bits

#: Set in the numbers of the Philox blocks that hold the last 16 bits; no element's index is that large.
LATE_BLOCKS: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def words(index, seed, stream):
    """The four words of the blocks with the given numbers."""
    lower, upper = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    of_stream = stream.to(tl.uint32), (stream >> 32).to(tl.uint32)
    return philox(lower, upper, of_stream[0], of_stream[1], seed.to(tl.uint32), (seed >> 32).to(tl.uint32))


@triton.jit
def interleave4(a, b, c, d):
    """Interleave the elements of four blocks: a0, b0, c0, d0, a1, b1 and so on."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def interleave8(a, b, c, d, e, f, g, h):
    """Interleave the elements of eight blocks."""
    return tl.interleave(interleave4(a, c, e, g), interleave4(b, d, f, h))


@triton.jit
def shared_words(block, seed, stream, RUN: tl.constexpr):
    """Draw random words, one for every two elements; a thread makes those of `RUN` neighbours, 8 or 16.

    Args:
        block: The numbers of the runs' first Philox blocks, one after the other along the last dimension.
        seed: 64 bits.
        stream: 64 bits.
        RUN: Number of neighbours.
    """
    a, b, c, d = words(block, seed, stream)
    if RUN == 8:
        return interleave4(a, b, c, d)
    else:
        e, f, g, h = words(block + 1, seed, stream)
        return interleave8(a, b, c, d, e, f, g, h)


@triton.jit
def half_words(block, seed, stream, RUN: tl.constexpr):
    """The half words of `shared_words`, one per element."""
    drawn = shared_words(block, seed, stream, RUN)
    return tl.interleave(drawn & 0xFFFF, drawn >> 16)


@triton.jit
def single_half_words(index, seed, stream, LATE: tl.constexpr):
    """The half word of each index, at any position in its Philox block: one Philox call per element."""
    block = index // 8
    if LATE:
        block |= LATE_BLOCKS
    place = (index % 8 // 2).to(tl.int32)
    a, b, c, d = words(block, seed, stream)
    drawn = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    return tl.where(index % 2 == 0, drawn & 0xFFFF, drawn >> 16)


class Words(NamedTuple):
    """The random words of elements whose last 16 bits are not drawn yet.

    Attributes:
        words: The Philox word of each element; two neighbours share one.
        place: The position of each element in its Philox block, 0 to 7.
        block: The number of that Philox block.
        seed: 64 bits.
        stream: 64 bits.
    """

    words: Any
    place: Any
    block: Any
    seed: Any
    stream: Any


@triton.jit
def behind_first(first, steps):
    """Numbers some steps behind a first one; behind several, each has a row."""
    if first.type.is_block():
        first, steps = first[:, None], steps[None, :]
    return first + steps


@triton.jit
def words_of_runs(noise, first, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """The `Words` of `WIDTH` elements from the logical index 8 * `first` on; see `behind_first`."""
    drawn = shared_words(behind_first(first, RUN // 8 * tl.arange(0, WIDTH // RUN)), noise.seed, noise.stream, RUN)
    place, block = tl.arange(0, WIDTH) & 7, behind_first(first, tl.arange(0, WIDTH) >> 3)
    if first.type.is_block():
        place = tl.broadcast_to(place[None, :], block.shape)
    return Words(tl.interleave(drawn, drawn), place, block, noise.seed, noise.stream)


@triton.jit
def words_at(noise, index):
    """The `Words` of the elements with the given logical indices, which need not be consecutive."""
    block = index // 8
    place = (index % 8).to(tl.int32)
    a, b, c, d = words(block, noise.seed, noise.stream)
    drawn = tl.where(place < 4, tl.where(place < 2, a, b), tl.where(place < 6, c, d))
    return Words(drawn, place, block, noise.seed, noise.stream)


@triton.jit
def integers_of_runs(noise, runs, ROUNDING: tl.constexpr, RUN: tl.constexpr):
    """`random_integers` of runs of neighbours, given the numbers of their first Philox blocks."""
    bits = half_words(runs, noise.seed, noise.stream, RUN)
    if not ROUNDING.draws_16:
        bits = bits << 16 | half_words(runs | LATE_BLOCKS, noise.seed, noise.stream, RUN)
    return as_added(bits, noise, ROUNDING)


@triton.jit
def random_integers(noise, first, ROUNDING: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """The random integers of neighbours for `round_bits` and `round_magnitude`; zero where the rounding needs none.

    Args:
        noise: A `Noise`.
        first: Logical index of the first element, or of the first of each row.
        ROUNDING: The `KernelVariant`.
        RUN: Number of neighbours a thread holds, so that words are made where they are used instead of going through shared memory.
        ALIGNED: Whether `first` begins a Philox block.
        WIDTH: Number of elements, or of those in a row.

    Returns:
        `Words` for the variants that draw later.
        Otherwise integers in the top bits of 16 or 32 for `round_magnitude`, of 32 for `round_bits` or, on float64, of 53.
    """
    drawn = 0
    if ROUNDING.draws:
        HALVES: tl.constexpr = max(RUN, 8)
        if ROUNDING.draws_late and ALIGNED:
            drawn = words_of_runs(noise, first // 8, HALVES, WIDTH)
        elif ROUNDING.draws_late:
            drawn = words_at(noise, behind_first(first, tl.arange(0, WIDTH)))
        elif ALIGNED:
            drawn = integers_of_runs(noise, behind_first(first // 8, HALVES // 8 * tl.arange(0, WIDTH // HALVES)), ROUNDING, HALVES)
        else:
            drawn = integers_at(noise, behind_first(first, tl.arange(0, WIDTH)), ROUNDING)
    return drawn


@triton.jit
def integers_at(noise, index, ROUNDING: tl.constexpr):
    """`random_integers` of the elements with the given logical indices, which need not be consecutive."""
    drawn = 0
    if ROUNDING.draws:
        bits = single_half_words(index, noise.seed, noise.stream, False)
        if not ROUNDING.draws_16:
            bits = bits << 16 | single_half_words(index, noise.seed, noise.stream, True)
        drawn = as_added(bits, noise, ROUNDING)
    return drawn


@triton.jit
def as_added(bits, noise, ROUNDING: tl.constexpr):
    """Return random bits as a rounding adds them: 16 where these are enough and the rounding is fast, otherwise those of `random_bits`."""
    used = noise.used
    if ROUNDING.draws_16 and ROUNDING.fast:
        if not ROUNDING.uses_all:
            bits = (bits & (used.keep >> 16)) | (used.correction >> 16)
    else:
        if ROUNDING.draws_16:
            bits <<= 16
        if not ROUNDING.uses_all:
            bits = random_bits(bits, used, ROUNDING)
        elif ROUNDING.wide:
            bits = bits.to(tl.int64) << 21
    return bits
