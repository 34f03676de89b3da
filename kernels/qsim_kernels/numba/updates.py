"""Optimizer steps on CPUs, in loops compiled by Numba; bit for bit the same as `qsim_kernels.torch.updates`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from qsim_kernels.numba import quantize_into
from qsim_kernels.numba.arguments import readable, strip
from qsim_kernels.numba.jobs import StoredRounding, UpdateJob, UpdateKeys, packed
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import SINGLE, grid_bits, rounding_bits
from qsim_kernels.numbers.grid import GridRounding, Noise, NoiseNumbers
from qsim_kernels.numbers.updates import (
    ROLES,
    AdamAlgorithm,
    Algorithm,
    Factors,
    PlaceNumbers,
    Roundings,
    Step,
    UpdateTensors,
    update_variant,
)
from qsim_kernels.torch import ElementNoise, updates as reference
from qsim_kernels.torch.rounding import one_nan

_LOOPS = {name: Loop("updates", name) for name in ("adam", "amsgrad", "sgd", "momentum", "nesterov")}
_NO_KEYS = UpdateKeys(*[NoiseNumbers(0, 0, 0)] * ROLES)


def update(step: Step, algorithm: Algorithm, roundings: Roundings) -> None:
    """Update parameters by one step; see `torch.updates.update`."""
    if roundings.in_format or any(rounding_bits(*rounding, wide=False).carrier != SINGLE for rounding in roundings[:3]):
        reference.update(step, algorithm, roundings, _rounded)
    else:
        reference.update(step, algorithm, roundings, _rounded, _update_whole)


def _update_whole(
    x: UpdateTensors,
    factors: Factors,
    key: Callable[[int], tuple[int, int]],
    place: PlaceNumbers,
    algorithm: Algorithm,
    roundings: Roundings,
) -> None:
    """Update one parameter."""
    held = UpdateTensors(*(None if tensor is None else readable(tensor) for tensor in x))
    state = held.first if held.first is not None else held.param
    addresses = UpdateTensors(*(0 if tensor is None else tensor.data_ptr() for tensor in held))
    param_is_narrow, grad_is_narrow, state_is_narrow = (tensor.element_size() == 2 for tensor in (held.param, held.grad, state))
    variant = update_variant(algorithm, roundings.in_format, scaled=True, moment=held.first is not None)
    draws = roundings.weights.rule.draws or roundings.state.rule.draws
    drawn = (NoiseNumbers(_signed(seed), _signed(stream), 0) for seed, stream in map(key, range(ROLES)))
    keys = UpdateKeys(*drawn) if draws else _NO_KEYS
    weights, compensations, moments = _stored(roundings)
    job = UpdateJob(
        addresses, param_is_narrow, grad_is_narrow, state_is_narrow, variant, factors, place, weights, compensations, moments, keys
    )
    _LOOPS[_loop(algorithm, held)].share(packed(job), held.param.numel())
    for tensor, result in zip(x, held, strict=True):
        if tensor is not None and result is not None and result is not tensor and tensor is not x.grad:
            tensor.copy_(one_nan(result.to(tensor.dtype)))


@cache
def _stored(roundings: Roundings) -> tuple[StoredRounding, ...]:
    """The roundings of weights, of compensations and of moments."""
    return tuple(StoredRounding(strip(grid_bits(grid, wide=False), rule), rule.saturates) for grid, rule in roundings[:3])


def _loop(algorithm: Algorithm, x: UpdateTensors) -> str:
    """The name of the loop of an algorithm."""
    if isinstance(algorithm, AdamAlgorithm):
        return "amsgrad" if algorithm.amsgrad else "adam"
    return "sgd" if x.first is None else "nesterov" if algorithm.nesterov else "momentum"


def _rounded(x: Tensor, rounding: GridRounding, noise: ElementNoise | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Round float32 values onto a grid; see `torch.updates.rounded`."""
    if noise is not None and isinstance(noise.where, Tensor):
        return reference.rounded(x, rounding, noise, dtype)
    if rounding.rule.saturates:
        x = x.masked_fill(x.isinf(), math.nan)
    out = torch.empty_like(x, dtype=dtype)
    given: Noise = None, 0, 0
    if noise is not None:
        given = torch.tensor(_signed(int(noise.seed)), device="cpu"), _signed(noise.stream), int(noise.where)
    quantize_into(out, x, rounding, given)
    return out


def _signed(word: int) -> int:
    """The same 64 bits as a signed number, which tensors can hold."""
    return word - (1 << 64) if word >> 63 else word
