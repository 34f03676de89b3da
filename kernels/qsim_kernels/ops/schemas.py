"""Schemas of operators from the annotations of the functions that implement them, so that each signature is written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

#: The types of schemas by annotations, which are text.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[int]": "SymInt[]",
    "int": "SymInt",
    "str": "str",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
}


def schema_of(function: Callable[..., Any]) -> str:
    """The schema of an operator that a function or a bound method implements, and that has its name.

    Example:
        >>> from qsim_kernels.ops.transposes import encode_transpose
        >>> schema_of(encode_transpose)
        'encode_transpose(Tensor x, Tensor? seed, str rounding, SymInt stream, ScalarType dtype) -> Tensor'
    """
    signature = inspect.signature(function)
    given = [f"{_TYPES[each.annotation]} {each.name}{_default(each)}" for each in signature.parameters.values()]
    return f"{function.__name__}({', '.join(given)}) -> {_TYPES[signature.return_annotation]}"


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f"={parameter.default!r}"
