"""Which tensors come from parameters: they and their views, and tensors computed only from them, as casts are, or from one and a mask.

Functions and operators are followed each in their own way. While a converted model runs, results of functions have their parameter as an
attribute, which compilers follow as well; a view has its base. The shard of a distributed parameter, which function modes do not see being
taken, is known by the module that runs. `Origins` follows operators by the storages of tensors: below functions, where autocast casts, and
in backward passes, tensors are new objects without attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef

from qsim.nn.calls.running import running
from qsim.private import schema_of, shard_of
from qsim_kernels.private import tree_leaves

_MAY_BE_DISTRIBUTED = distributed.is_available()
_PARAMETER = "_qsim_parameter"


def parameter_of(x: Any) -> Tensor | None:
    """The parameter that a tensor comes from, the first one of several; `None` for everything else."""
    if not isinstance(x, Tensor):
        return None
    own = base_of_view(x)
    if type(own) is not Tensor and isinstance(own, nn.Parameter):  # the second question is slow
        return own
    known: Tensor | None = getattr(own, _PARAMETER, None)
    if known is None and own is not x and torch.compiler.is_compiling():  # compilers lose attributes of bases
        known = next((parameter for other, parameter in running.derived or () if other is own or other is x), None)
    return _sharded(own) if known is None else known


def _sharded(x: Tensor) -> Tensor | None:
    """The distributed parameter of the innermost running module that has a tensor as its shard."""
    if not _MAY_BE_DISTRIBUTED or not distributed.is_initialized() or not running.modules:
        return None
    parameters = running.modules[-1]._parameters.values()
    return next((own for own in parameters if own is not None and shard_of(own) is x), None)


def base_of_view(x: Tensor) -> Tensor:
    """The tensor that a view is of; any other tensor itself."""
    return x if x._base is None else x._base


def follow(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """Name a function's result after its parameter if all floating-point tensors that it takes are weights; an index may be anything.

    A weight times a buffer of its shape, such as a mask, is a weight, too.
    """
    if not isinstance(result, Tensor) or not args:
        return
    first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
    parameter = parameter_of(first)
    if parameter is None and _is_buffer(first):
        parameter = next((own for own in map(parameter_of, args[1:]) if own is not None), None)
    if parameter is None or not result.is_floating_point() or parameter_of(result) is not None:
        return
    # These take only the dtype of the other tensor.
    is_cast = function is Tensor.to or function is Tensor.type_as
    others = [] if is_cast else [x for x in _floating(args, kwargs) if parameter_of(x) is None]
    if not others or (result.shape == parameter.shape and all(map(_is_buffer, others))):
        setattr(result, _PARAMETER, parameter)
        if torch.compiler.is_compiling():
            running.derived = [*(running.derived or ()), (result, parameter)]


def _floating(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The floating-point tensors among arguments."""
    given = [x for one in (*args, *kwargs.values()) for x in (one if isinstance(one, (list, tuple)) else (one,))]
    return [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]


def _is_buffer(x: Any) -> bool:
    """Whether a tensor is a buffer of the running module, or a view of one."""
    buffers = running.modules[-1]._buffers if running.modules else {}
    return len(buffers) > 0 and isinstance(x, Tensor) and any(base_of_view(x) is buffer for buffer in buffers.values())


class Origins:
    """Names of what tensors come from, by their storage, so that views have the name of their base.

    Storages are referenced weakly: their memory is freed as usual, and no other storage gets their address.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[StorageWeakRef, str] = {}
        for kind, tensors in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
            for name, tensor in tensors:
                self._set(tensor, f"the {kind} {name}")

    def name(self, x: Tensor) -> str | None:
        """The name of the parameter or buffer that a tensor was computed from; `None` if it depends on inputs."""
        storage = _storage(x)
        return None if storage is None else self._names.get(storage)

    def follow(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Name an operator's results if all floating-point tensors that it takes have names; an index may be anything.

        A row that a lookup finds is an activation.
        """
        given = _floating(args, kwargs)
        names = [self.name(x) for x in given]
        is_named = bool(names) and None not in names and "embedding" not in str(operator)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and is_named:
                self._set(x, str(names[0]))
            elif isinstance(x, Tensor) and given and schema_of(operator).is_mutable:
                self._names.pop(_storage(x), None)  # type: ignore[arg-type]

    def _set(self, x: Tensor, name: str) -> None:
        storage = _storage(x)
        if storage is not None:
            self._names.setdefault(storage, name)


def _storage(x: Tensor) -> StorageWeakRef | None:
    """A tensor's storage; `None` for tensors without one, as sparse ones."""
    try:
        return StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
