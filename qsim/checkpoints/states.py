"""The tensors of a model's state: which of them are the same, and whether they fit another model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qsim.nn.histories import RemembersAmaxes, histories_of, modules_in
from qsim.nn.modules import FivePointModule
from qsim.random.shards import is_distributed, local


def check_state(action: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Raise an error for a state that is not made of dense tensors with values.

    Args:
        action: The function that writes them, for errors.
        state: A `state_dict`.
    """
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{action}: {name} is not a tensor but {type(tensor).__name__}, which safetensors files cannot hold")
        if is_lazy(tensor):
            raise ValueError(f"{action}: {name} is lazy and has seen no input: call the model once before")
        if tensor.is_meta:
            raise ValueError(f"{action}: {name} is on the meta device and has no values")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{action}: {name} must be a dense tensor, got layout {tensor.layout}")
    return dict(state)


def unshared(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors of a state, and for each further name of one of them its first name.

    Example:
        >>> import torch
        >>> from qsim.checkpoints.states import unshared
        >>> weight = torch.zeros(2)
        >>> unshared({"embedding": weight, "head": weight})
        ({'embedding': tensor([0., 0.])}, {'head': 'embedding'})
    """
    first: dict[object, str] = {}
    tensors, shared = {}, {}
    for name, tensor in state.items():
        own = local(tensor)
        place = (own.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if own.numel() else name
        if place in first:
            shared[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor
    return tensors, shared


#: Bytes that are in memory at a time, in addition to the model, if single tensors are not larger.
_LOADED = 2**26


def load_in_turn(model: nn.Module, state: Mapping[str, Callable[[], Tensor]], *, strict: bool = False) -> None:
    """Load tensors into a model, some at a time, so that they are not all in memory together with those of the model.

    Args:
        model: The model.
        state: For each name a function that reads the tensor.
        strict: Whether the model must have these tensors and no others.
    """
    if strict:
        _check_names(state, model.state_dict())
    pending: dict[str, Tensor] = {}
    size = 0
    for name, read in state.items():
        pending[name] = read()
        size += pending[name].nbytes
        if size >= _LOADED:
            model.load_state_dict(pending, strict=False)
            pending, size = {}, 0
    model.load_state_dict(pending, strict=False)


def gathered(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all ranks if it is distributed."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def check_loads(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raise an error unless a model has exactly the saved tensors, in their shapes and dtypes.

    Histories of delayed scales and modules in points do not count: they come with the points.
    """
    own = model.state_dict()
    for module_name, module in model.named_modules():
        if isinstance(module, FivePointModule):
            for part, point in modules_in(module.points).items():
                for name in point.state_dict(prefix=f"{module_name}.{part}.".lstrip(".")):
                    own.pop(name, None)
        if isinstance(module, RemembersAmaxes):
            for history in histories_of(module).values():
                for name in history.names:
                    own.pop(f"{module_name}.{name}".lstrip("."), None)
    _check_names(saved, own)
    for name, tensor in saved.items():
        mine = own[name]
        if is_distributed(mine):
            raise TypeError(f"load: {name} is distributed: load the model first, then shard it")
        if mine.is_meta:
            raise ValueError(f"load: {name} is on the meta device: call model.to_empty(device=…) first")
        if mine.shape != tensor.shape:
            raise ValueError(f"load: {name} has shape {tuple(mine.shape)} in the model and was saved with {tuple(tensor.shape)}")
        if mine.dtype != tensor.dtype:
            raise ValueError(f"load: {name} is {mine.dtype} in the model and was saved as {tensor.dtype}: model.to({tensor.dtype}) first")


def _check_names(saved: Collection[str], own: Collection[str]) -> None:
    """Raise an error unless saved tensors have the names of a model's own."""
    for one, other, lacks in ((saved, own, "the model lacks"), (own, saved, "the folder lacks")):
        names = [name for name in one if name not in other]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"load: {lacks} {', '.join(names[:3])}{more}: the saved model had another architecture")
