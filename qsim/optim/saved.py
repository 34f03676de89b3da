"""Loading the states of optimizers: checked against the parameters, in their own dtypes, also from torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

StateDict = dict[str, Any]

# Options in torch's groups about its implementations of a step.
_OF_TORCH = ("foreach", "fused", "capturable", "differentiable")
_OF_ALL = ("step", "compensation", "beta_products")


def adapted(given: StateDict, groups: list[dict[str, Any]], names: tuple[str, ...]) -> StateDict:
    """A state_dict with the options that only this optimizer has, checked.

    Args:
        given: The state_dict.
        groups: The optimizer's groups.
        names: The states that its parameters may have, in addition to those that every optimizer here has.

    Raises:
        ValueError: If it belongs to another model or another optimizer.
    """
    saved = given["param_groups"]
    _check_groups(saved, groups)
    params = dict(zip(chain.from_iterable(g["params"] for g in saved), chain.from_iterable(g["params"] for g in groups), strict=True))
    for key, state in given["state"].items():
        if key in params:
            _check_state(key, state, params[key], names)
    filled = [
        {**{name: value for name, value in group.items() if name != "params"}, **{k: v for k, v in old.items() if k not in _OF_TORCH}}
        for old, group in zip(saved, groups, strict=True)
    ]
    return {**given, "param_groups": filled}


def _check_groups(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != own:
        raise ValueError(f"the state_dict is of another model: it has groups of {sizes} parameters, the optimizer has {own}")
    for group, own_group in zip(saved, groups, strict=True):
        # The option that identifies Adam, and the one of SGD: present even before there are states.
        for option in ("betas", "momentum"):
            if option in own_group and option not in group:
                raise ValueError(f"the state_dict is of another optimizer: its groups have no {option!r}, only {', '.join(group)}")


def _check_state(key: Any, state: dict[str, Any], p: Tensor, names: tuple[str, ...]) -> None:
    for name, value in state.items():
        if name not in (*names, *_OF_ALL):
            raise ValueError(f"the state_dict is of another optimizer: parameter {key} has {name!r}, known are {', '.join(names)}")
        if name in (*names, "compensation") and isinstance(value, Tensor) and value.shape != p.shape:
            shapes = f"{name} of parameter {key} has shape {tuple(value.shape)}, the parameter {tuple(p.shape)}"
            raise ValueError(f"the state_dict is of another model: {shapes}")


def restored(
    state: dict[Tensor, dict[str, Any]],
    saved: StateDict,
    groups: list[dict[str, Any]],
    dtypes_of: Callable[[dict[str, Any], Tensor], dict[str, torch.dtype]],
) -> None:
    """Load the states of a state_dict, in the required dtypes.

    Args:
        state: The optimizer's state.
        saved: The state_dict.
        groups: The optimizer's groups.
        dtypes_of: The states that a parameter of a group has, with their dtypes.
    """
    for old, group in zip(saved["param_groups"], groups, strict=True):
        for key, p in zip(old["params"], group["params"], strict=True):
            if key not in saved["state"]:
                continue
            dtypes, given = dtypes_of(group, p), saved["state"][key]
            # torch's optimizers keep a momentum of None before the first step, and of SGD no count of steps.
            own = {name: value for name, value in given.items() if value is not None and name in dtypes}
            if "step" in dtypes and "step" not in own and own:
                own["step"] = torch.ones(())
            state[p] = {name: _restored(value, dtypes[name], p.device) for name, value in own.items()}


def _restored(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(value).detach().clone().to(dtype=dtype, device=device)
