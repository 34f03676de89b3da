"""The function mode that finds functions that count as one operator each, before torch decomposes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qsim.functional.bodies import body
from qsim.functional.fpu.mode import RoundingMode, innermost
from qsim.functional.fpu.names import ONCE, THEIR_OWN, name_of
from qsim.functional.fpu.one_operator import once

#: Python functions composed of intercepted ones; a mode sees only the outermost call.
_MADE_OF_OTHERS = (F.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class WholeFunctionMode(TorchFunctionMode):
    """Make functions that count as one operator round once, or not at all.

    Args:
        mode: The mode that rounds. This one does nothing if that is not the innermost.
        keep: The functions to leave in full precision, by their common names.
    """

    def __init__(self, mode: RoundingMode, keep: frozenset[str]) -> None:
        super().__init__()
        self._mode = mode
        self._keep = keep | THEIR_OWN
        self._of_interest = self._keep | (ONCE if mode.output is not None else frozenset())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function."""
        kwargs = kwargs or {}
        if func in _MADE_OF_OTHERS:
            with self:
                return body(func)(*args, **kwargs)
        name = name_of(func)
        if name == "setitem" and "setitem" not in self._keep and innermost() is self._mode:
            args = _filled(*args)
        if name not in self._of_interest or innermost() is not self._mode:
            return func(*args, **kwargs)
        output = None if name in self._keep else self._mode.output
        target, args, kwargs, function = _apart(func, args, kwargs)
        result = once(function, args, kwargs, output)
        return result if target is None else target.copy_(result)


def _filled(x: Tensor, index: Any, value: Any) -> tuple[Tensor, Any, Any]:
    """The arguments of `x[index] = value`, with a number as a tensor that an operator of the mode has filled and rounded."""
    if not isinstance(value, (int, float)) or not x.is_floating_point():
        return x, index, value
    with torch.no_grad():
        return x, index, torch.full_like(x[index], value)


def _apart(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor | None, tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
    """A call without in-place effects, and the tensor to copy its result to if it works in place or has `out=`."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"], args, {name: value for name, value in kwargs.items() if name != "out"}, func
    name = func.__name__
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, Tensor) or not (in_place or kwargs.get("inplace")):
        return None, args, kwargs, func
    # The gradient may need the old value of the tensor.
    args = (first.clone(), *args[1:])
    kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    plain = getattr(torch.Tensor, name_of(func), None) or getattr(F, name_of(func), None)
    return first, args, kwargs, plain if in_place and plain is not None else func
