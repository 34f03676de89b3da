"""What became of the elements of a tensor when they were rounded, from one read of both; see `reference.tally`."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels import tallies
from qsim_kernels.triton.blocks import as_single, load
from qsim_kernels.triton.launch import Launcher, flat

_BLOCK = 1024
#: Blocks of each program, which has counts of its own: nothing is added atomically, so that sums are the same every time. Of large tensors
#: they are more, because writing the counts is worth a block or two.
_FEW, _MANY, _LARGE = 8, 64, 1 << 23

FIELDS: tl.constexpr = tl.constexpr(tallies.FIELDS)
LARGEST: tl.constexpr = tl.constexpr(tallies.LARGEST)
SPECIAL: tl.constexpr = tl.constexpr(tallies.SPECIAL)
BIAS: tl.constexpr = tl.constexpr(tallies.BIAS)
SIZE: tl.constexpr = tl.constexpr(tallies.SIZE)
SUMS: tl.constexpr = tl.constexpr(tallies.SUMS)
ZERO: tl.constexpr = tl.constexpr(tallies.ZERO)
NAN: tl.constexpr = tl.constexpr(tallies.NAN)
SATURATED: tl.constexpr = tl.constexpr(tallies.SATURATED)
UNDERFLOWED: tl.constexpr = tl.constexpr(tallies.UNDERFLOWED)
EXACT: tl.constexpr = tl.constexpr(tallies.EXACT)
SIGNAL: tl.constexpr = tl.constexpr(tallies.SIGNAL)
NOISE: tl.constexpr = tl.constexpr(tallies.NOISE)


@triton.jit
def fields_of(x):
    """The exponent fields that elements have, or would have, in float32."""
    if x.dtype == tl.float64:
        field = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32)
        within = tl.minimum(tl.maximum(field - 1023 + BIAS, 0), LARGEST)
        result = tl.where(field == 0x7FF, SPECIAL, within)
    else:
        result = (as_single(x).to(tl.int32, bitcast=True) >> 23) & SPECIAL
    return result


@triton.jit
def is_finite(x):
    """Whether float64 numbers are."""
    return (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000) != 0x7FF0000000000000


@triton.jit(do_not_specialize=["count", "low", "high"])
def tally_kernel(
    elements, rounded, counts, sums, count: tl.int64, low: tl.int64, high: tl.int64, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes what each program has counted; what lies beyond the end counts as field 0 and as nothing else."""
    program = tl.program_id(0).to(tl.int64)
    lowest, highest = low.to(tl.float64, bitcast=True), high.to(tl.float64, bitcast=True)
    place = tl.arange(0, BLOCK)
    fields = tl.zeros([FIELDS], tl.int32)
    zero, nan, saturated = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    underflowed, exact = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    signal, noise = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for step in range(BLOCKS):
        start = (program * BLOCKS + step) * BLOCK
        left = count - start
        here = place < left
        before = load(elements + start, place, left, True)
        after = load(rounded + start, place, left, True)
        fields += tl.histogram(fields_of(before), FIELDS)
        x, q = as_single(before).to(tl.float64), as_single(after).to(tl.float64)
        beyond = (x > highest) | (x < lowest)
        within = here & (beyond == 0)
        zero += (here & (x == 0.0)).to(tl.int32)
        nan += (here & (x != x)).to(tl.int32)
        saturated += (here & beyond).to(tl.int32)
        underflowed += (within & (q == 0.0) & (x != 0.0)).to(tl.int32)
        exact += (within & (q == x)).to(tl.int32)
        finite = is_finite(x) & is_finite(q)
        x, q = tl.where(finite, x, 0.0), tl.where(finite, q, 0.0)
        signal += x * x
        noise += (q - x) * (q - x)
    own = counts + program * SIZE
    tl.store(own + tl.arange(0, FIELDS), fields)
    tl.store(own + ZERO, tl.sum(zero))
    tl.store(own + NAN, tl.sum(nan))
    tl.store(own + SATURATED, tl.sum(saturated))
    tl.store(own + UNDERFLOWED, tl.sum(underflowed))
    tl.store(own + EXACT, tl.sum(exact))
    tl.store(sums + program * SUMS + SIGNAL, tl.sum(signal))
    tl.store(sums + program * SUMS + NOISE, tl.sum(noise))


@lru_cache(maxsize=16)
def _launcher(before: torch.dtype, after: torch.dtype, blocks: int) -> Launcher:
    """One for each pair of dtypes: a launcher's compiled forms do not tell them apart."""
    return Launcher(tally_kernel, (), (blocks, _BLOCK), blocks * _BLOCK)


def tally_into(counts: Tensor, sums: Tensor, x: Tensor, rounded: Tensor, low: float, high: float) -> None:
    """Adds up what became of the elements of a tensor; see `reference.tally_into`."""
    count = x.numel()
    if not count:
        return
    blocks = _FEW if count < _LARGE else _MANY
    programs = -(-count // (_BLOCK * blocks))
    own_counts = torch.empty(programs, tallies.SIZE, dtype=torch.int32, device=x.device)
    own_sums = torch.empty(programs, tallies.SUMS, dtype=torch.float64, device=x.device)
    others = (own_counts, own_sums, count, _pattern(low), _pattern(high))
    _launcher(x.dtype, rounded.dtype, blocks).launch(programs, flat(x), flat(rounded), *others)
    counts += own_counts.sum(0)
    counts[0] -= programs * blocks * _BLOCK - count
    sums += own_sums.sum(0)


def _pattern(value: float) -> int:
    """The bits of a float64."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found
