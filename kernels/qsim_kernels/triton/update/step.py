"""One optimizer step: at most three launches, whatever the number of tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.carrier import double_bits
from qsim_kernels.numbers.grid import Grid, Mode, Rule
from qsim_kernels.numbers.updates import AdamAlgorithm, Algorithm, Roundings, Step, own_grid, update_variant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch, Launcher, launcher
from qsim_kernels.triton.update.kernels import update_kernel
from qsim_kernels.triton.update.multi_tensor import table_of, work_of
from qsim_kernels.triton.update.prepare import prepare_kernel
from qsim_kernels.triton.update.rules import Kind

_BLOCK = 512
_STEPS = 4  # blocks that one program works on
_LANES = 32
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


def update(step: Step, algorithm: Algorithm, roundings: Roundings) -> None:
    """Update parameters by one step; see `torch.updates.update`."""
    given = (*step[:6], step.products)
    smooth = tuple(column if all(map(Tensor.is_contiguous, column)) else [x.contiguous() for x in column] for column in given)
    params, device = step.params, step.params[0].device
    counts = tuple(map(Tensor.numel, params))
    table = table_of((*smooth[:6], step.steps, smooth[6]), counts, step.streams, step.places)
    pointer = step.lr if step.lr.device == device else None
    # Kernels would round numbers that are passed to them as such.
    rate = 0 if pointer is not None else double_bits(float(step.lr))
    absent = step.found_inf is None, step.grad_scale is None, pointer is None
    types = (params[0].dtype, step.grads[0].dtype, step.first[0].dtype if step.first else None)
    prepare, *updates = _launchers(algorithm, roundings, types, bool(step.compensations), absent)
    programs = -(-len(params) // _LANES)
    Launch(prepare, programs)(
        table.device, table.factors, table.keys, len(params), pointer, rate, step.grad_scale, step.found_inf, step.seed
    )
    for work, move in zip(work_of(params, counts, table.smooth, _STEPS * _BLOCK), updates, strict=True):
        Launch(move, len(work))(table.device, work, table.factors, table.keys, step.found_inf)
    for column, flattened in zip(given, smooth, strict=True):
        if column is not step.grads and column is not flattened:
            for x, result in zip(column, flattened, strict=True):
                if result is not x:
                    x.copy_(result)


@lru_cache(maxsize=4096)
def _launchers(
    algorithm: Algorithm,
    roundings: Roundings,
    types: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    kahan: bool,
    absent: tuple[bool, bool, bool],
) -> tuple[Launcher, Launcher, Launcher]:
    """The launchers for the numbers of a step, for full blocks of tensors that allow wide accesses, and for everything else.

    Args:
        algorithm: The algorithm.
        roundings: Its roundings.
        types: The dtypes of parameters, gradients and moments; None for no moments.
        kahan: Whether there are compensations.
        absent: Whether there is no `found_inf`, no `grad_scale`, and no learning rate on the device.
    """
    param, grad, moment = types
    state = param if moment is None else moment
    inner, (*inner_numbers, _, _) = arguments.rounding(roundings.inner, False)
    kind = Kind(
        update_variant(algorithm, roundings.in_format, not absent[1], moment is not None),
        adam=isinstance(algorithm, AdamAlgorithm),
        kahan=kahan,
        native=_is_native(*roundings.weights, param),
        native_inner=_is_native(*roundings.inner, param),
        native_moments=_is_native(*roundings.state, state),
        inner=inner,
        stored=_TYPES[param],
    )
    if isinstance(algorithm, AdamAlgorithm):
        factors = (algorithm.beta1, algorithm.beta2, algorithm.epsilon, algorithm.decay, 0.0)
    else:
        factors = (algorithm.momentum, 0.0, 0.0, algorithm.decay, algorithm.dampening)
    patterns = map(double_bits, factors)
    prepare = launcher(prepare_kernel, absent, *patterns, *inner_numbers, kind, _LANES, num_warps=1, enable_fp_fusion=False)
    weights, states = arguments.rounding(roundings.weights, False), arguments.rounding(roundings.state, False)
    run = 16 // max(param.itemsize, grad.itemsize, state.itemsize)
    constants = (kind, weights[0], states[0], _TYPES[grad], _TYPES[state], max(run, 4), _BLOCK, _STEPS)
    numbers = (*weights[1], *inner_numbers, *states[1])
    wide, rest = (
        launcher(update_kernel, absent[:1], *numbers, *constants, is_smooth, num_warps=2, enable_fp_fusion=False)
        for is_smooth in (True, False)
    )
    return prepare, wide, rest


def _is_native(grid: Grid, rule: Rule, dtype: torch.dtype) -> bool:
    return grid == own_grid(dtype) and not rule.saturates and (rule.mode == Mode.NEAREST or dtype == torch.float32)
