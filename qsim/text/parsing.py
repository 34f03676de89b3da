"""Reads a value from the call that it prints as: how configurations name formats and roundings."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard


def read_call(text: str, makers: Mapping[str, Callable[..., Any]]) -> Any | None:
    """Make the value whose call a text spells, or returns None if it is not such a call.

    Args:
        text: For example `"Float(4, 1, bias=9)"`; arguments are plain literals or such calls themselves, nothing is evaluated.
        makers: What may be called, by name.

    Raises:
        TypeError: If the arguments do not fit.
        ValueError: If the maker refuses them, or one is given twice.

    Example:
        >>> from qsim.text.parsing import read_call
        >>> read_call("dict(a=1, b='x')", {"dict": dict})
        {'a': 1, 'b': 'x'}
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # as for thousands of brackets or signs
        return None
    return _made(call, text, makers) if _is_call(call, makers) else None


def _is_call(node: ast.expr, makers: Mapping[str, Callable[..., Any]]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers


def _made(call: ast.Call, text: str, makers: Mapping[str, Callable[..., Any]]) -> Any:
    def value(node: ast.expr) -> Any:
        if _is_call(node, makers):
            return _made(node, text, makers)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text!r}: arguments must be plain numbers, strings, True, False or None") from error

    assert isinstance(call.func, ast.Name)
    names = [option.arg for option in call.keywords]
    if None in names or len(set(names)) < len(names):
        raise ValueError(f"{text!r}: each argument of {call.func.id} must be given once, by its name or its position")
    options = {str(option.arg): value(option.value) for option in call.keywords}
    return makers[call.func.id](*map(value, call.args), **options)
