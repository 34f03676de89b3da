"""Copies of the weights in a higher precision, which an optimizer updates in place of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qsim.formats import Format, holders
from qsim.random import shards

#: The name of a copy in a state_dict, next to the optimizer's states of a parameter.
KEY = "quantized_accumulator"
#: The same without an accumulator: the unrounded weights while an optimizer is in evaluation mode.
UNROUNDED = "quantized_unrounded"


def dtype_of(fmt: Format | None, parameter: Tensor) -> torch.dtype:
    """The dtype of a copy: the parameter's if that holds the format or there is none, else the narrowest that does."""
    if fmt is None:
        return parameter.dtype
    able = holders(fmt)
    return parameter.dtype if parameter.dtype in able else able[0]


def copy_of(parameter: Tensor, fmt: Format | None = None) -> Tensor:
    """A copy that an optimizer treats as a parameter."""
    return parameter.detach().to(dtype_of(fmt, parameter), copy=True).requires_grad_(parameter.requires_grad)


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


def loaded(saved: Mapping[Any, Tensor], keys: list[Any], parameters: list[Tensor], fmt: Format | None) -> dict[Tensor, Tensor]:
    """The copies of a state_dict, by parameter.

    Raises:
        ValueError: If one does not fit its parameter.
    """
    copies, name = {}, "accumulator" if fmt is not None else "unrounded weight"
    for number, (key, parameter) in enumerate(zip(keys, parameters, strict=False)):
        if key in saved:
            copy, dtype = saved[key], dtype_of(fmt, parameter)
            found, due = (copy.shape, copy.dtype, shards.is_distributed(copy)), (parameter.shape, dtype, shards.is_distributed(parameter))
            if found != due:
                raise ValueError(f"Quantized: the {name} of parameter {number} must be {_words(*due)}, the state_dict has {_words(*found)}")
            copies[parameter] = copy.detach().to(parameter.device, copy=True).requires_grad_(parameter.requires_grad)
    return copies


def _words(shape: torch.Size, dtype: torch.dtype, distributed: bool) -> str:
    return f"a {'distributed ' if distributed else ''}tensor of shape {tuple(shape)} in {dtype}"
