"""Reads a value from the call that it prints as: how configurations name formats and roundings."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any


def read_call(text: str, makers: Mapping[str, Callable[..., Any]]) -> Any | None:
    """Make the value whose call a text spells, or returns None if it is not such a call.

    Args:
        text: For example `"Float(4, 1, bias=9)"`; arguments are plain literals, nothing is evaluated.
        makers: What may be called, by name.

    Raises:
        TypeError: If the arguments do not fit.
        ValueError: If the maker refuses them.

    Example:
        >>> from qsim.text.parsing import read_call
        >>> read_call("dict(a=1, b='x')", {"dict": dict})
        {'a': 1, 'b': 'x'}
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in makers):
        return None
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except ValueError as error:
        raise ValueError(f"{text!r}: arguments must be plain numbers, strings, True, False or None") from error
    return makers[call.func.id](*arguments, **options)
