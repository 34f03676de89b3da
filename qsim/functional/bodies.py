"""Bodies of torch's Python functions, so that function modes see the calls inside them and not only the outermost one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def body(function: FunctionType) -> Callable[..., Any]:
    """The function without overrides."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    found = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found
