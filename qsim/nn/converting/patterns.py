"""Patterns of the names of layers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from qsim.nn.converting.layers import Layer


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether a pattern matches one of a module's names, or a module that contains it."""
    return any(fnmatchcase(part, pattern) for pattern in patterns for name in names for part in _outer(name))


def _outer(name: str) -> list[str]:
    """A module's name, and those of the modules around it."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def patterns_of_layers(
    argument: str, given: str | Iterable[str], usable: Sequence[Layer], left: Sequence[tuple[Layer, str]]
) -> tuple[str, ...]:
    """Patterns, each of which must match a layer that can be converted.

    Args:
        argument: What they were given as.
        given: One pattern, or several.
        usable: The layers that can be converted.
        left: The layers that cannot, each with the reason.
    """
    patterns = listed("convert", argument, given)
    for pattern in patterns:
        if any(matches(layer.names, [pattern]) for layer in usable):
            continue
        for layer, reason in left:
            if matches(layer.names, [pattern]):
                raise ValueError(f"convert: {argument} pattern {pattern!r} matches no layer that can round; {layer.title}: {reason}")
        names = [layer.names[0] for layer in usable if layer.names[0]]
        near = _near(pattern, names, "the only one is the model itself" if usable else "the model has none that could round")
        raise ValueError(f"convert: {argument} pattern {pattern!r} matches no layer; {near}")
    return patterns


def patterns_of_modules(argument: str, given: str | Iterable[str] | None, model: nn.Module) -> tuple[str, ...]:
    """Patterns, each of which must match a module, possibly one that is left alone anyway."""
    patterns = listed("convert", argument, given)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not any(matches([name], [pattern]) for name in names):
            raise ValueError(
                f"convert: {argument} pattern {pattern!r} matches no module; {_near(pattern, names[1:], 'the model has none in it')}"
            )
    return patterns


def listed(function: str, argument: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """One pattern, several, or none with `None`, as a tuple.

    Args:
        function: What they were given to.
        argument: What they were given as.
        given: The patterns.
    """
    if given is None:
        return ()
    if not isinstance(given, Iterable):
        raise TypeError(f"{function}: {argument} must be a pattern of names, several patterns or None, got {given!r}")
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{function}: the patterns of {argument} must be strings, got {pattern!r}")
    return patterns


def _near(pattern: str, names: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"there are {', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''}" if names else otherwise
