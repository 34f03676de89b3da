"""Settings of a study as options of the command line: one for each field, read as the field's default is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any


def choice(default: Any, help: str) -> Any:
    """A field of settings.

    Args:
        default: A number, a string, or a tuple of them; what the command line gives is read as the same kind.
        help: What is chosen.
    """
    return field(default=default, metadata={"help": help})


# Between values; the commas of one that is a call, as of a format, stand in parentheses.
_COMMA = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True)
class _Reader:
    """Reads words as values like some other value."""

    like: Any

    def __call__(self, text: str) -> Any:
        if not isinstance(self.like, tuple):
            return _scalar(self.like)(text)
        return tuple(_scalar(self.like[0])(word.strip()) for word in _COMMA.split(text) if word.strip())


def add_options(parser: argparse._ActionsContainer, settings: Any) -> None:
    """Gives a parser one option for each setting."""
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
    """What of the settings the command line names."""
    found = {setting.name: getattr(args, setting.name) for setting in fields(settings)}
    return {name: value for name, value in found.items() if value is not None}


_METAVARS = {int: "N", float: "X", str: "NAME"}


def _flag(setting: Field[Any]) -> str:
    return "--" + setting.name.replace("_", "-")


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _scalar(like: Any) -> Callable[[str], Any]:
    kind: Callable[[str], Any] = type(like)
    return kind
