"""Checks of the arguments of `Quantized`: quantizers, parameters and gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qsim.formats.dtypes import FLOATS
from qsim.functional.arguments import overlaps, refuse_dtype, spelling
from qsim.functional.quantizer import Point, Quantizer, check_call
from qsim.random import seeds, shards
from qsim.rounding import NEAREST
from qsim.scaling import PerBlock

#: 0-d tensors that torch's optimizers keep next to the states of a parameter, which may itself be 0-d.
_SCALARS = ("step", "mu_product", "eta", "mu")

States = Quantizer | dict[str, Quantizer | None] | None


def quantizer_of(name: str, point: Point) -> Quantizer | None:
    """The quantizer of a point; errors name the point."""
    if point is None:
        return None
    try:
        found = point if isinstance(point, Quantizer) else Quantizer(point)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Quantized: {name}: {error}") from error
    check_call(f"Quantized: {name}", found)
    of_blocks = name.startswith("state") and isinstance(found.scale, PerBlock)
    for given in (None if of_blocks else found.scale, found.transform):
        if given is not None:
            others = ", except for states in blocks" if given is found.scale else ""
            raise ValueError(
                f"Quantized: {name}: optimizers round element by element, without scales and transforms{others}, got {given!r}"
            )
    return found


def to_nearest(quantizer: Quantizer) -> Quantizer:
    """A quantizer that rounds to nearest, whatever the rounding of the given one."""
    return dataclasses.replace(quantizer, rounding=NEAREST)


def states_of(given: Point | Mapping[str, Point]) -> States:
    """One quantizer for all states, or those of some by name."""
    if not isinstance(given, Mapping):
        return quantizer_of("state", given)
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"Quantized: state names must be strings, got {name!r}")
    return {name: quantizer_of(f"state[{name!r}]", point) for name, point in given.items()}


def check_scale(scale: Any) -> float:
    """The factor that gradients are multiplied by."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"Quantized: grad_scale must be a number, got {scale!r}")
    if not 0 < scale < math.inf:
        raise ValueError(f"Quantized: grad_scale must be positive and finite, got {scale}")
    return float(scale)


def saturating(point: Quantizer | None) -> Quantizer | None:
    """A point whose values saturate, unless its quantizer says otherwise."""
    return point if point is None or point.overflow is not None else dataclasses.replace(point, overflow="saturate")


def checked_seed(seed: Any) -> int:
    """A seed as a state_dict keeps it."""
    try:
        seeds.check_source(seed, None, torch.device("cpu"))
    except (TypeError, ValueError) as error:
        raise type(error)(f"Quantized: {error}") from error
    return int(seed)


def check_parameter(number: int, parameter: Tensor, weight: Quantizer | None) -> None:
    """Raise an error for a parameter that cannot be rounded."""
    _check_tensor(f"parameter {number}", parameter)
    if weight is not None:
        check_holds(f"weight of parameter {number}", parameter, weight)


def check_gradient(number: int, gradient: Tensor, quantizer: Quantizer | None) -> None:
    """Raise an error for a gradient that cannot be multiplied and rounded in place."""
    _check_tensor(f"the gradient of parameter {number}", gradient)
    if overlaps(gradient):
        raise ValueError(f"Quantized: elements of the gradient of parameter {number} share one place in memory (an expanded tensor)")
    if quantizer is not None:
        check_holds(f"gradient of parameter {number}", gradient, quantizer)


def check_holds(name: str, x: Tensor, quantizer: Quantizer) -> None:
    """Raise an error for a tensor whose dtype cannot hold its target format."""
    spelt = spelling(quantizer.format, quantizer.rounding, quantizer.usual_overflow)
    if x.dtype not in spelt.holders:
        refuse_dtype(spelt, x.dtype, f"Quantized: {name}")


def states_of_parameter(state: Mapping[Any, Any], parameter: Tensor) -> list[tuple[str, Tensor]]:
    """An optimizer's floating-point states of a parameter, by name."""
    tensors = [(str(name), x) for name, x in state.items() if isinstance(x, Tensor) and x.is_floating_point()]
    return [(name, x) for name, x in tensors if x.dim() or (not parameter.dim() and name not in _SCALARS)]


def placed_alike(name: str, x: Tensor, parameter: Tensor) -> Tensor:
    """The tensor with a state's placements: the state itself, or the parameter if the state of its shard is a plain tensor."""
    if shards.is_distributed(x) or not shards.is_distributed(parameter):
        return x
    share = shards.local(parameter).shape
    if x.shape != share:
        raise ValueError(
            f"Quantized: state {name!r} must be distributed or of the share's shape {tuple(share)}, got shape {tuple(x.shape)}"
        )
    return parameter


def check_state(name: str, number: int, x: Tensor, parameter: Tensor, quantizer: Quantizer) -> None:
    """Raise an error for a state that cannot be rounded."""
    title = f"state {name!r} of parameter {number}"
    if quantizer.scale is None:
        check_holds(title, x, quantizer)
    elif x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"Quantized: {title}: states with scales must be float32 or float64, got {x.dtype}")
    elif shards.is_distributed(x) or shards.is_distributed(parameter):
        raise ValueError(f"Quantized: {title}: blocks of a distributed state would depend on the shards; give a format without scales")


def check_names(wanted: Iterable[str], known: set[str], optimizer: str) -> None:
    """Raise an error for names of states that an optimizer does not have."""
    unknown = [name for name in wanted if name not in known]
    if unknown:
        listed = ", ".join(sorted(known)) or "none"
        raise ValueError(f"Quantized: {optimizer} keeps no state {unknown[0]!r}; those that can be rounded: {listed}")


def _check_tensor(name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise TypeError(f"Quantized: {name} must be dense, got layout {x.layout}")
    if x.dtype not in FLOATS:
        raise TypeError(f"Quantized: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
