"""Copies of the weights in a higher precision, which an optimizer updates in place of the model's parameters.

Those of an accumulator are kept. Without one, a parameter whose dtype would round the step before qsim can has a copy for that step only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qsim.formats import FP32, Format, holders, holds
from qsim.functional.quantizer import Quantizer
from qsim.random import shards
from qsim.rounding import NEAREST

#: The name of a copy in a state_dict, next to the optimizer's states of a parameter.
KEY = "quantized_accumulator"
#: The same without an accumulator: the unrounded weights while an optimizer is in evaluation mode.
UNROUNDED = "quantized_unrounded"


def dtype_of(parameter: Tensor, quantizers: Iterable[Quantizer], fmt: Format | None = None) -> torch.dtype:
    """The dtype in which a step of a parameter is computed, so that rounding its results does not find them rounded already.

    Args:
        parameter: The parameter.
        quantizers: The roundings of what the optimizer computes: weights, or their copies, and states. If there are none, the step is
            computed in the parameter's dtype.
        fmt: The format of a copy, which the dtype must hold.
    """
    if not (quantizers := list(quantizers)):
        return parameter.dtype
    # Rounding to all 24 bits of float32 has an effect only on wider numbers; to nearest, the optimizer has done it.
    widest = any(q.format == FP32 and q.rounding != NEAREST for q in quantizers)
    dtype = torch.float64 if widest else torch.promote_types(parameter.dtype, torch.float32)
    return dtype if fmt is None or holds(dtype, fmt) else holders(fmt)[0]


def copy_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that an optimizer treats as a parameter."""
    return parameter.detach().to(dtype, copy=True).requires_grad_(parameter.requires_grad)


@contextmanager
def parameters_exchanged(optimizer: torch.optim.Optimizer, by: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Replace an optimizer's parameters, with their state, by other tensors while the block runs.

    The lists of parameters stay the same objects with other members, because some optimizers (LBFGS) keep the lists.
    """
    _exchange(optimizer, by)
    try:
        yield
    finally:
        _exchange(optimizer, {new: old for old, new in by.items()})


def _exchange(optimizer: torch.optim.Optimizer, by: Mapping[Tensor, Tensor]) -> None:
    if not by:
        return
    for group in optimizer.param_groups:
        group["params"][:] = [by.get(parameter, parameter) for parameter in group["params"]]
    state = optimizer.state
    for key in [key for key in state if isinstance(key, Tensor)]:
        state[by.get(key, key)] = state.pop(key)


@contextmanager
def mixed_groups_one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Update tensors one by one in groups whose members are not all plain, or all of one mesh, while the block runs.

    torch's functions of lists, which optimizers use by default on GPUs, take tensors of one kind.
    """
    options = [
        (group, name, group[name])
        for group in optimizer.param_groups
        if len({getattr(p, "device_mesh", None) for p in group["params"]}) > 1
        for name in ("foreach", "fused")
        if name in group
    ]
    for group, name, _ in options:
        group[name] = False
    try:
        yield
    finally:
        for group, name, value in options:
            group[name] = value


def keys_of(state_dict: Mapping[str, Any]) -> list[Any]:
    """The identifiers of the parameters in a state_dict, in order."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def with_copies(
    state_dict: dict[str, Any], parameters: Iterable[Tensor], copies: Mapping[Tensor, Tensor], name: str = KEY
) -> dict[str, Any]:
    """A state_dict with the copies in each parameter's state, by a name."""
    state = dict(state_dict["state"])
    for key, parameter in zip(keys_of(state_dict), parameters, strict=True):
        if parameter in copies:
            state[key] = {**state.get(key, {}), name: copies[parameter].detach()}
    return {**state_dict, "state": state}


def split(state_dict: dict[str, Any], name: str = KEY) -> tuple[dict[str, Any], dict[Any, Tensor]]:
    """Split a state_dict into the optimizer's own and the copies added under a name."""
    saved = {key: entry[name] for key, entry in state_dict["state"].items() if isinstance(entry, Mapping) and name in entry}
    rest = {key: {k: v for k, v in entry.items() if k != name} if key in saved else entry for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": {key: entry for key, entry in rest.items() if entry or key not in saved}}, saved


def loaded(saved: Mapping[Any, Tensor], keys: list[Any], dtypes: Mapping[Tensor, torch.dtype], name: str) -> dict[Tensor, Tensor]:
    """The copies of a state_dict, by parameter.

    Args:
        saved: The copies by key.
        keys: The keys of the parameters in the state_dict, in order.
        dtypes: The parameters in order, and the dtypes of their copies, which hold narrower ones exactly.
        name: What the copies are, for errors.

    Raises:
        ValueError: If one does not fit its parameter.
    """
    copies = {}
    for number, (key, (parameter, dtype)) in enumerate(zip(keys, dtypes.items(), strict=False)):
        if key in saved:
            copy = saved[key]
            found, due = (copy.shape, copy.dtype, shards.is_distributed(copy)), (parameter.shape, dtype, shards.is_distributed(parameter))
            if found[::2] != due[::2] or torch.promote_types(copy.dtype, dtype) != dtype:
                raise ValueError(f"Quantized: the {name} of parameter {number} must be {_words(*due)}, the state_dict has {_words(*found)}")
            copies[parameter] = copy.detach().to(parameter.device, dtype, copy=True).requires_grad_(parameter.requires_grad)
    return copies


def _words(shape: torch.Size, dtype: torch.dtype, distributed: bool) -> str:
    return f"a {'distributed ' if distributed else ''}tensor of shape {tuple(shape)} in {dtype}"
