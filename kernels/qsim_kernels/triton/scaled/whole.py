"""The scale of a whole tensor in one launch: the program that finishes last computes it from the largest magnitude of all."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.scales import ScaleNumbers, Scales
from qsim_kernels.private import current_stream as _current_stream
from qsim_kernels.torch.persistent import persistent
from qsim_kernels.triton.device.blocks import as_single
from qsim_kernels.triton.device.pairs import larger_pair
from qsim_kernels.triton.device.parts import block_part, load_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.tile_scales import making_of, scale_numbers, tile_scales
from qsim_kernels.triton.host.capabilities import supports_packed_16_bit
from qsim_kernels.triton.host.launcher import Launch, launcher

#: The zeros of `state_for`, by device and stream.
_states: dict[tuple[int, int], Tensor] = {}

#: Blocks of pairs that a program reads at once.
AT_ONCE: tl.constexpr = tl.constexpr(8)
#: Elements that a single program reads at most, in eight blocks, and from where on programs read more than eight.
_SMALL, _LARGE = 1 << 16, 1 << 24


@triton.jit
def largest_pattern(x, start, count, FINITE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The magnitude patterns of a block."""
    bits = as_single(load_part(x, block_part(start, count, BLOCK, MASKED))).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if FINITE:
        bits = tl.where(bits < 0x7F800000, bits, 0)
    return bits


@triton.jit
def largest_of_blocks(
    x, first, count, FINITE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, IN_PAIRS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The largest magnitude pattern of some blocks; `IN_PAIRS` compares bfloat16 values two at a time, whether they are finite or not."""
    if IN_PAIRS:
        largest = tl.zeros([BLOCK], tl.bfloat16)
        for step in range(0, STEPS, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                largest = larger_pair(largest, load_part(x, block_part(first + (step + i) * BLOCK, count, BLOCK, MASKED)))
        amaxes = (largest.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) << 16
    else:
        amaxes = tl.zeros([BLOCK], tl.int32)
        for step in range(STEPS):
            amaxes = tl.maximum(amaxes, largest_pattern(x, first + step * BLOCK, count, FINITE, BLOCK, MASKED))
    return tl.max(amaxes)


@triton.jit
def write_scale(out, state, amax, making, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr):
    """Write the scale that results from the largest magnitude pattern of all programs, each of which gives its own."""
    is_last = True
    if state is not None:
        tl.atomic_max(state, amax, sem="relaxed")
        # What the others wrote before they were counted is visible to the last.
        is_last = tl.atomic_add(state + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1
        if is_last:
            amax = tl.atomic_max(state, 0, sem="relaxed")
            tl.store(state + tl.arange(0, 2), tl.zeros([2], tl.int32))
    if is_last:
        scale, _ = tile_scales(tl.zeros([1], tl.int32) + amax, None, scale_numbers(making, SCALE_ROUNDING), MAKING, SCALE_ROUNDING)
        tl.store(out + tl.arange(0, 1), scale)


@kernel(do_not_specialize_on_alignment=["out", "state"])
def whole_scale_kernel(
    x, out, state, count: tl.int64, making: ScaleNumbers,
    MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, FINITE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write the scale of `count` elements; several programs share a `state`; see `state_for`."""
    first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    if first + STEPS * BLOCK <= count:
        amax = largest_of_blocks(x, first, count, FINITE, STEPS, BLOCK, IN_PAIRS, False)
    else:
        amax = largest_of_blocks(x, first, count, FINITE, STEPS, BLOCK, IN_PAIRS, True)
    if IN_PAIRS and FINITE:
        # Rare: then the program reads its blocks again.
        has_others = amax >= 0x7F800000
        if has_others:
            amax = largest_of_blocks(x, first, count, FINITE, STEPS, BLOCK, False, True)
    write_scale(out, state, amax, making, MAKING, SCALE_ROUNDING)


def state_for(x: Tensor) -> Tensor:
    """Two zeros for the programs that read a tensor: the largest pattern so far, and how many are done; they leave zeros behind.

    Each stream has its own, because launches on two streams may run at the same time. So may a CUDA graph's and any other.
    """
    device = x.get_device()
    if device < 0 or torch.cuda.is_current_stream_capturing():
        return x.new_zeros(2, dtype=torch.int32)
    key = device, _current_stream(device)
    state = _states.get(key)
    if state is None:
        state = _states.setdefault(key, persistent([0, 0], torch.int32, x.device))
    return state


def whole_scale_into(out: Tensor, x: Tensor, making: Scales, finite: bool) -> None:
    """Write the scale of a tensor of at most 32 bits, from the largest magnitude of its elements or of the finite ones."""
    launch = _prepared(x.shape, x.dtype, making, finite)
    launch(x.contiguous(), out, None if launch.programs == 1 else state_for(x))


@lru_cache(maxsize=4096)
def _prepared(shape: torch.Size, source: torch.dtype, making: Scales, finite: bool) -> Launch:
    count = shape.numel()
    single = count <= _SMALL
    # All programs of a tensor count up one number, which takes longer than reading if there are many.
    steps, block, warps = (8, _SMALL // 8, 32) if single else (32 if count > _LARGE else 8, 1024, 4)
    variants, numbers = making_of(making, False)
    in_pairs = source == torch.bfloat16 and supports_packed_16_bit()
    run = launcher(whole_scale_kernel, (source, single), *numbers, *variants, finite, steps, block, in_pairs, num_warps=warps)
    return Launch(run, -(-count // (steps * block)), (count,))
