"""Tallies of rounding outcomes over a tensor's elements, in one read of both tensors; see `reference.tally`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers import tallies
from qsim_kernels.numbers.carrier import double_bits
from qsim_kernels.triton.device.blocks import as_single
from qsim_kernels.triton.device.parts import block_part, load_part
from qsim_kernels.triton.host.launcher import Launch, launcher

_BLOCK, _WARPS = 512, 4
#: Blocks per program. Large tensors use more, because adding up a program's counts costs as much as a block or two.
_FEW, _MANY, _LARGE = 4, 32, 1 << 23
#: Elements whose squares are summed before they are added to those of other blocks; a thread reads this many at once.
_GROUP = 4

FIELDS, LARGEST, SPECIAL, BIAS = map(tl.constexpr, (tallies.FIELDS, tallies.LARGEST, tallies.SPECIAL, tallies.BIAS))
SUMS, SIGNAL, NOISE = map(tl.constexpr, (tallies.SUMS, tallies.SIGNAL, tallies.NOISE))
#: The counts after those of fields share the bits of one integer: each has this many, enough for a program's blocks.
EACH: tl.constexpr = tl.constexpr(6)
MOST: tl.constexpr = tl.constexpr(63)
_PLACES = (tallies.ZERO, tallies.NAN, tallies.SATURATED, tallies.UNDERFLOWED, tallies.EXACT)
ZERO, NAN, SATURATED, UNDERFLOWED, EXACT = (tl.constexpr(1 << 6 * (place - tallies.FIELDS)) for place in _PLACES)
FACTS: tl.constexpr = tl.constexpr(tallies.SIZE - tallies.FIELDS)


@triton.jit
def fields_of(x):
    """The elements' exponent fields in float32."""
    if x.dtype == tl.float64:
        field = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32)
        within = tl.minimum(tl.maximum(field - 1023 + BIAS, 0), LARGEST)
        return tl.where(field == 0x7FF, SPECIAL, within)
    else:
        return (as_single(x).to(tl.int32, bitcast=True) >> 23) & SPECIAL


@triton.jit
def facts_of(x, q, lowest, highest):
    """The outcomes of elements, packed into an integer with a bit field per count."""
    beyond = (x > highest) | (x < lowest)
    fate = tl.where(beyond, SATURATED, tl.where(q == x, EXACT, tl.where((q == 0.0) & (x == x), UNDERFLOWED, 0)))
    return fate + tl.where(x == 0.0, ZERO, tl.where(x != x, NAN, 0))


@triton.jit
def sums_of_neighbours(squares, GROUP: tl.constexpr):
    """The sums of neighbours."""
    return tl.sum(tl.reshape(squares, [squares.shape[0] // GROUP, GROUP]), 1)


@triton.jit
def tally_block(elements, rounded, start, count, lowest, highest, MASKED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The counts of one block; positions past the end count only as field 0."""
    part = block_part(start, count, BLOCK, MASKED)
    before, after = load_part(elements, part), load_part(rounded, part)
    fields = tl.histogram(fields_of(before), FIELDS)
    x, q = as_single(before).to(lowest.dtype), as_single(after).to(lowest.dtype)
    facts = facts_of(x, q, lowest, highest)
    if MASKED:
        facts = tl.where(part.inside, facts, 0)
    finite = (tl.abs(x) < float("inf")) & (tl.abs(q) < float("inf"))
    x, q = tl.where(finite, x, 0.0).to(tl.float64), tl.where(finite, q, 0.0).to(tl.float64)
    return fields, facts, sums_of_neighbours(x * x, GROUP), sums_of_neighbours((q - x) * (q - x), GROUP)


@triton.jit(do_not_specialize=["count", "low", "high"])
def tally_kernel(
    elements, rounded, counts, sums, count: tl.int64, low: tl.int64, high: tl.int64,
    SINGLE: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add each program's counts to the totals, and write its sums, which are added later in a fixed order."""
    program = tl.program_id(0).to(tl.int64)
    lowest, highest = low.to(tl.float64, bitcast=True), high.to(tl.float64, bitcast=True)
    if SINGLE:
        lowest, highest = lowest.to(tl.float32), highest.to(tl.float32)
    fields, facts = tl.zeros([FIELDS], tl.int32), tl.zeros([BLOCK], tl.int32)
    signal, noise = tl.zeros([BLOCK // GROUP], tl.float64), tl.zeros([BLOCK // GROUP], tl.float64)
    first = program * (BLOCKS * BLOCK)
    for step in range(BLOCKS):
        start = first + step * BLOCK
        left = count - start
        if left >= BLOCK:
            block = tally_block(elements, rounded, start, count, lowest, highest, False, BLOCK, GROUP)
            fields, facts, signal, noise = fields + block[0], facts + block[1], signal + block[2], noise + block[3]
        elif left > 0:
            block = tally_block(elements, rounded, start, count, lowest, highest, True, BLOCK, GROUP)
            fields, facts, signal, noise = fields + block[0], facts + block[1], signal + block[2], noise + block[3]
            fields -= tl.where(tl.arange(0, FIELDS) == 0, (BLOCK - left).to(tl.int32), 0)
    tl.atomic_add(counts + tl.arange(0, FIELDS), fields.to(tl.int64), mask=fields != 0, sem="relaxed")
    for fact in tl.static_range(FACTS):
        total = tl.sum((facts >> (EACH * fact)) & MOST)
        tl.atomic_add(counts + FIELDS + fact, total.to(tl.int64), sem="relaxed")
    tl.store(sums + program * SUMS + SIGNAL, tl.sum(signal))
    tl.store(sums + program * SUMS + NOISE, tl.sum(noise))


def tally(x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Count and sum rounding outcomes over a tensor's elements; see `reference.tally`."""
    counts = torch.zeros(tallies.SIZE, dtype=torch.int64, device=x.device)
    count = x.numel()
    if not count:
        return counts, torch.zeros(tallies.SUMS, dtype=torch.float64, device=x.device)
    blocks = _FEW if count < _LARGE else _MANY
    programs = -(-count // (_BLOCK * blocks))
    sums = torch.empty(programs, tallies.SUMS, dtype=torch.float64, device=x.device)
    single = torch.float64 not in (x.dtype, rounded.dtype) and all(map(_is_single, (low, high)))
    constants = (single, blocks, _GROUP, _BLOCK)
    run = launcher(tally_kernel, (x.dtype, rounded.dtype), *constants, num_warps=_WARPS)
    Launch(run, programs)(x.contiguous(), rounded.contiguous(), counts, sums, count, double_bits(low), double_bits(high))
    return counts, sums.sum(0)


def _is_single(value: float) -> bool:
    """Whether float32 holds a number exactly."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32)) == value
