"""How to repeat a sweep: a configuration file if its functions can be imported, and otherwise the program that made it."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsim import FivePoint
from qsim.recipes import Recipe
from qsim.studies.sweeps.results import Settings
from qsim.studies.sweeps.sources import Sources
from qsim.text.files import write_whole

#: The name of the configuration in a sweep's folder.
CONFIG = "sweep.json"
#: The functions of a configuration, by their names there.
_FUNCTIONS = {"model": "make_model", "data": "data", "loss": "loss", "optimizer": "make_optimizer"}


def configuration(sources: Sources, points: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The configuration that `qsim study sweep --config` takes.

    Raises:
        ValueError: If a function cannot be imported by its name, or points cannot be written as plain values.
    """
    found: dict[str, Any] = {name: _place(name, getattr(sources, attribute)) for name, attribute in _FUNCTIONS.items()}
    grid = {name: getattr(settings, name) for name in ("batches", "rates", "steps", "seeds", "designs", "tolerance")}
    key = {} if sources.data_key is None else {"data_key": sources.data_key}
    return found | {"points": {label: _plain(label, chosen) for label, chosen in points.items()}} | grid | key


def write_configuration(folder: Path, sources: Sources, points: Mapping[str, Any], settings: Settings) -> str:
    """Write the configuration of a sweep into its folder, if there is one.

    Returns:
        How to repeat the sweep: a command, or a sentence.
    """
    try:
        config = configuration(sources, points, settings)
    except ValueError as error:
        program = Path(sys.argv[0]) if sys.argv and sys.argv[0].endswith(".py") else None
        again = f"run `{shlex.join([Path(sys.executable).name, *sys.argv])}` again" if program is not None else "call it again"
        return f"called as `qsim.studies.sweep` from Python; {again}: no command repeats it, because {error}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return f"`{shlex.join(['qsim', 'study', 'sweep', '--config', str(folder / CONFIG), '--out', str(folder)])}`"


def _place(name: str, function: Any) -> str:
    """A function as `module:name`, by which it can be imported."""
    module, own = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not callable(function):
        raise ValueError(f"{name} is not a function of a module")
    if getattr(importlib.import_module(module), own, None) is not function:
        raise ValueError(f"{name} is {module}.{own}, which cannot be imported by this name")
    return f"{module}:{own}"


def _plain(label: str, points: Any) -> Any:
    if points is None or isinstance(points, str):
        return points
    if isinstance(points, FivePoint | Recipe):
        return points.to_dict()
    raise ValueError(f"the points {label!r} are given as a {type(points).__name__}, not as a name, a recipe or a FivePoint")
