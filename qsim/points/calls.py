"""The calls that create ready-made points, as text: how recipes and configurations hold modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from math import isfinite
from typing import Any

import torch

from qsim.formats import Format, name_of
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.rounding import Rounding
from qsim.scaling import Block, Scaling


def call_of(maker: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """The shortest call of a class with given arguments; `None` if plain text cannot express them.

    Args:
        maker: The class.
        args: The arguments given by position.
        options: The arguments given by name.

    Example:
        >>> from qsim.points import LSQ
        >>> from qsim.points.calls import call_of
        >>> call_of(LSQ, ("int4",), {"step": 0.5, "channels": 1})
        "LSQ('int4', 0.5)"
    """
    parameters = signature(maker).parameters
    try:
        given = signature(maker).bind(*args, **options).arguments
        shown = {name: text for name, value in given.items() if (text := _text(value)) != _text(parameters[name].default)}
    except (TypeError, ValueError):  # the maker itself raises the error for arguments that do not fit
        return None
    parts, in_order = [], True
    for name, parameter in parameters.items():
        in_order = in_order and name in shown and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        if name in shown:
            parts.append(shown[name] if in_order else f"{name}={shown[name]}")
    return f"{maker.__name__}({', '.join(parts)})"


def _text(value: Any) -> str:
    """The text of an argument, which `qsim.text.parsing.read_call` reads.

    Raises:
        ValueError: If there is none.
    """
    call = getattr(value, "call", None)
    if isinstance(call, str):
        return call
    if isinstance(value, Quantizer):
        usual = {"rounding": "nearest", "clip_gradient": False}
        return f"Quantizer({', '.join(f'{name}={part!r}' for name, part in value.to_dict().items() if part != usual.get(name))})"
    if isinstance(value, Format):
        return repr(name_of(value))
    if isinstance(value, Rounding):
        return repr(repr(value) if value.is_stochastic else str(value))
    if isinstance(value, torch.dtype):
        return repr(str(value).removeprefix("torch."))
    if isinstance(value, (Block, Scaling, Hadamard)) or value is Parameter.empty:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if (value is not None and not isinstance(value, (bool, int, float, str))) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"plain text cannot express {value!r}")
    return repr(value)
