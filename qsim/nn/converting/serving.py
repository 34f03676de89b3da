"""A check before training: which layers of a converted model a checkpoint could hold, as a dry run of `qsim.export` answers.

Checkpoints are above this room, which imports nothing from there: `qsim/__init__.py` sets `dry_runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from qsim.text.warning import warn


class Refusals(Protocol):
    """The parts of a dry run that a conversion needs; see `qsim.checkpoints.Export`."""

    @property
    def refused(self) -> Sequence[tuple[str, str]]:
        """The layers that the layout cannot express, and the reasons."""


#: For a function's name, for errors, and a layout, a function of a model and inputs that does the dry run.
dry_runner: Callable[[str, str], Callable[[nn.Module, Any], Refusals]]


def report(layout: str, dry_run: Callable[[nn.Module, Any], Refusals], model: nn.Module, example: Any, *, verbose: bool) -> None:
    """Warn of layers that a layout cannot express, and print all that a checkpoint would hold, if asked to."""
    try:
        found = dry_run(model, example)
    except (TypeError, ValueError) as error:
        warn(f"convert: the model is converted, but cannot be exported as it is: {error}")
        return
    if verbose:
        print(found)
    if found.refused:
        name, reason = found.refused[0]
        more = f" ({len(found.refused)} layers in all)" if len(found.refused) > 1 else ""
        warn(f"convert: layout {layout!r} cannot express {name}{more}: {reason}; qsim.export(…, dry_run=True) lists all layers")
