"""Inputs of a model, given as one argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def inputs_of(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and the keyword arguments of a model: a tuple is several inputs, a dictionary inputs by keyword, else it is one input.

    Example:
        >>> from qsim.nn.examples import inputs_of
        >>> inputs_of(1), inputs_of((1, 2)), inputs_of({"x": 1})
        (((1,), {}), ((1, 2), {}), ((), {'x': 1}))
    """
    if isinstance(example, Mapping):
        return (), example
    return example if isinstance(example, tuple) else (example,), {}
