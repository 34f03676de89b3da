"""Which tensors are weights: parameters, their views, and tensors computed from parameters only, as casts are, or from one and a mask.

A view has its base. Results of functions have an attribute with their parameter, which compilers follow as well. The shard of a distributed
parameter, which function modes do not see being taken, is known by the module that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, distributed, nn

from qsim.nn.calls.running import running

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
    return _sharded(own) if known is None else known


def _sharded(x: Tensor) -> Tensor | None:
    """The distributed parameter of the innermost running module that has a tensor as its shard."""
    if not _MAY_BE_DISTRIBUTED or not distributed.is_initialized() or not running.modules:
        return None
    parameters = running.modules[-1]._parameters.values()
    return next((own for own in parameters if own is not None and getattr(own, "_local_tensor", None) is x), None)


def base_of_view(x: Tensor) -> Tensor:
    """The tensor that a view is of; any other tensor itself."""
    return x if x._base is None else x._base


def follow(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
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
    given = [x for one in (*args, *kwargs.values()) for x in (one if isinstance(one, (list, tuple)) else (one,))]
    others = [x for x in given if isinstance(x, Tensor) and x.is_floating_point() and parameter_of(x) is None]
    if not others or (result.shape == parameter.shape and all(map(_is_buffer, others))):
        setattr(result, _PARAMETER, parameter)


def _is_buffer(x: Any) -> bool:
    """Whether a tensor is a buffer of the running module, or a view of one."""
    buffers = running.modules[-1]._buffers if running.modules else {}
    return len(buffers) > 0 and isinstance(x, Tensor) and any(base_of_view(x) is buffer for buffer in buffers.values())
