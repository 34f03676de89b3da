"""The common part of the operators that round in the basis of a transform, of tensors that may be stored transposed.

They are `quantize_best`, `quantize_nested` and `quantize_eden`. Each has a kernel that loads a region in the basis, rounds it, and stores
it from the basis. Where the largest magnitude of the whole tensor is needed, another kernel finds it first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.scales import ScaledRounding, Scales
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_in_basis, region_place
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.host.layouts import in_order
from qsim_kernels.triton.scaled.partition import Cut, Reading, ScaledCall, call_of, cut_small, cut_transposed, reading

#: Regions of which a program finds the largest magnitude.
_STEPS = 8


#: The regions of a tensor, and how they are read.
RegionsInBasis = tuple[Cut, Reading]


def regions_of(call: ScaledCall, width: int, scales: Scales) -> RegionsInBasis | None:
    """Regions that hold whole groups of a width; none where plain torch computes."""
    count, groups = call.shape.numel(), call.tiles._replace(width=width)
    read = reading(count, call.types[0], groups, call.turn) if count and torch.float64 not in call.types else None
    if read is None or call.tiles.columns % width or (read.turn.down and not call.unflipped):
        return None
    aligned = call.aligned and count % 8 == 0
    if call.rows:
        cut = cut_transposed(read, call.types, aligned, call.rows)
    else:
        cut = cut_small(read, call.types, call.elements, aligned, scales)
    return None if cut is None else (cut, read)


def form_of(call: ScaledCall) -> tuple[Any, ...]:
    """The part of a call that compiled kernels depend on."""
    return *call.types, call.unflipped, call.unseeded


#: Prepares the launch of a kernel and, if it needs the largest magnitude of the tensor, the regions in which that is found.
Prepare = Callable[[ScaledCall, Scales, Any], tuple[Launch, RegionsInBasis | None] | None]


def quantize_in_basis(
    prepare: Prepare,
    reference: Callable[..., None],
    out: Tensor,
    x: Tensor,
    flips: Tensor | None,
    scales: Scales,
    how: Any,
    rounding: ScaledRounding,
) -> None:
    """Round a tensor by a kernel, or in plain torch.

    Args:
        prepare: The function that prepares a launch.
        reference: The function of plain torch, with the following arguments.
        out: Of `x`'s shape.
        x: Values.
        flips: 1 or -1 for each element of a block of the transform.
        scales: How the scales of tiles are made.
        how: What is special about the operator.
        rounding: How elements are rounded.
    """
    is_stored = x.is_contiguous() and out.is_contiguous()
    rows = 0 if is_stored or x.dim() < 2 or not (x.mT.is_contiguous() and out.mT.is_contiguous()) else x.shape[-2]
    call, noise = call_of(out, x, rounding, rows=rows, unflipped=flips is None)
    prepared = prepare(call, scales, how) if is_stored or rows else None
    if prepared is None and not is_stored:
        in_order(lambda source, target: quantize_in_basis(prepare, reference, target, source, flips, scales, how, rounding), x, out)
    elif prepared is None:
        reference(out, x, flips, scales, how, rounding)
    else:
        launch, regions = prepared
        flips = None if flips is None else flips.to(torch.float32)
        launch(x, out, None if regions is None else largest_in_basis(x, flips, *regions), flips, *noise)


@kernel(do_not_specialize_on_alignment=["flips"])
def largest_kernel(x, out, flips, matrices: Matrices, signs: tl.int64, TURN: tl.constexpr, REGION: tl.constexpr, STEPS: tl.constexpr):
    """Raise a number, zero at first, to the pattern of the largest magnitude of some regions."""
    largest = tl.full((REGION.height, REGION.width), 0, tl.int32)
    for step in range(STEPS):
        at = region_place(tl.program_id(0) * STEPS + step, matrices, REGION)
        values = load_in_basis(x, flips, at, matrices, signs, TURN, REGION)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    found, out = tl.max(tl.max(largest, axis=1), axis=0), out.to(tl.pointer_type(tl.int32))
    # Few programs raise it, and all that do wait for each other.
    if found > tl.load(out, cache_modifier=".cg"):
        tl.atomic_max(out, found, sem="relaxed")


def largest_in_basis(x: Tensor, flips: Tensor | None, cut: Cut, read: Reading) -> Tensor:
    """The largest magnitude of a tensor in the basis of a transform; not finite if a value is not."""
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    _prepared(x.dtype, flips is None, cut, read)(x, largest, flips)
    return largest


@lru_cache(maxsize=4096)
def _prepared(source: torch.dtype, unflipped: bool, cut: Cut, read: Reading) -> Launch:
    steps = _STEPS if cut.programs % _STEPS == 0 else 1
    shared = cut._replace(programs=cut.programs // steps)
    return shared.launch(largest_kernel, (source, unflipped), (read.turn, cut.shape, steps), read.signs)
