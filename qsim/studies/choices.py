"""Settings of a study as command-line options: one per field, parsed like the field's default."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from qsim.text.lists import words


def choice(default: Any, help: str) -> Any:
    """A field of settings.

    Args:
        default: A number, a string, or a tuple of them; values on the command line are parsed as the same type.
        help: A description for the command line.
    """
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class _Reader:
    """Parse words as values of the same type as another value."""

    like: Any

    @property
    def __name__(self) -> str:
        """The name of these values in the errors of argparse."""
        return f"list of {type(self._one).__name__}" if isinstance(self.like, tuple) else type(self.like).__name__

    def __call__(self, text: str) -> Any:
        if not isinstance(self.like, tuple):
            return type(self.like)(text)
        return tuple(map(type(self._one), words(text)))

    @property
    def _one(self) -> Any:
        """One of several values; an empty list is one of words."""
        return self.like[0] if self.like else ""


def add_options(parser: argparse._ActionsContainer, settings: Any) -> None:
    """Give a parser one option for each setting."""
    for setting in fields(settings):
        default = getattr(settings, setting.name)
        parser.add_argument(
            _flag(setting),
            type=_Reader(default),
            metavar="A,B" if isinstance(default, tuple) else _METAVARS.get(type(default), "VALUE"),
            default=None,
            help=f"{setting.metadata['help']} (default: {_written(default)})",
        )


def given(args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    """The settings that the command line names."""
    found = {setting.name: getattr(args, setting.name) for setting in fields(settings)}
    return {name: value for name, value in found.items() if value is not None}


def require(settings: Any, name: str, holds: object, must: str) -> None:
    """Raise an error about a setting unless a condition holds.

    Example:
        >>> from types import SimpleNamespace
        >>> require(SimpleNamespace(seeds=1), "seeds", False, "be at least 2")
        Traceback (most recent call last):
        ...
        ValueError: seeds: must be at least 2; got 1
    """
    if not holds:
        given = getattr(settings, name)
        shown = repr(given) if isinstance(given, str) else _written(given) or "none"
        raise ValueError(f"{name}: must {must}; got {shown}")


def require_increasing(settings: Any, name: str, least: int = 2) -> None:
    """Require that a setting lists at least some numbers, in increasing order.

    Example:
        >>> from types import SimpleNamespace
        >>> require_increasing(SimpleNamespace(rates=(2.0, 1.0)), "rates")
        Traceback (most recent call last):
        ...
        ValueError: rates: must be at least two, in increasing order; got 2,1
    """
    given = getattr(settings, name)
    rises = len(given) >= least and list(given) == sorted(set(given))
    require(settings, name, rises, f"be at least {'two' if least == 2 else least}, in increasing order")


def require_among(settings: Any, name: str, allowed: Sequence[str]) -> None:
    """Require that a setting lists some of the words that are allowed."""
    given = getattr(settings, name)
    require(settings, name, given and set(given) <= set(allowed), f"be of {', '.join(allowed)}")


def imported(what: str, place: str) -> Any:
    """The object that `module:name` names; modules of the current folder are found.

    Args:
        what: What it is for, for errors.
        place: The text.

    Raises:
        ValueError: If there is no such module, or it has no such name.

    Example:
        >>> imported("loss", "math:sqrt")(4.0)
        2.0
    """
    module, separator, name = place.partition(":")
    if not (module and separator and name):
        raise ValueError(f"{what} must be MODULE:FUNCTION, got {place!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{what}: {place}: {error}") from error


_METAVARS = {int: "N", float: "X", str: "NAME"}


def _flag(setting: Field[Any]) -> str:
    return "--" + setting.name.replace("_", "-")


def _written(value: Any) -> str:
    return ",".join(map(_written, value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
