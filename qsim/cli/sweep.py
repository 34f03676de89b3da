"""`qsim study sweep`: points, batch sizes and learning rates on a model of a caller's module."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qsim import studies
from qsim.recipes import Recipe
from qsim.text.files import reading
from qsim.text.lists import words

_EXAMPLE = """\
examples:
  qsim study sweep --model mymodule:make --data mymodule:data --points mxfp8,mxfp4 --batches 16,64,256
  qsim study sweep --config study.json

make() returns a model; data() returns inputs, targets, test inputs and test targets, or two datasets. In study.json, options have the same
names, and lists are lists. Points may also be a dictionary from labels to names of recipes, to null for full precision, or to what
to_dict() of a FivePoint or a recipe returns. Options of the command line come before those of the file.
"""
_DEFAULTS = {"loss": "torch.nn.functional:cross_entropy", "optimizer": "torch.optim:AdamW"}


def sweep(options: list[str]) -> int:
    """Run the command with these options."""
    parser = argparse.ArgumentParser(
        prog="qsim study sweep",
        description="Train a model of your own with every combination of points, batch sizes and learning rates.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="JSON with these options")
    add("--model", metavar="MODULE:FUNCTION", help="a function that makes the model")
    add("--data", metavar="MODULE:FUNCTION", help="a function that returns training and test data")
    add("--loss", metavar="MODULE:FUNCTION", help=f"default: {_DEFAULTS['loss']}")
    add("--optimizer", metavar="MODULE:FUNCTION", help=f"default: {_DEFAULTS['optimizer']}")
    add("--points", type=words, metavar="A,B", help="recipes to compare with full precision")
    add("--batches", type=_numbers(int), metavar="A,B", help="examples per update (default: 64)")
    add("--rates", type=_numbers(float), metavar="A,B", help="learning rates (default: 0.001)")
    add("--steps", type=int, metavar="N", help="number of updates (default: 300)")
    add("--designs", type=words, metavar="A,B", help="what batch sizes have in common: steps, examples, or both (default: steps)")
    add("--seeds", type=int, metavar="N", help="number of seeds (default: 4)")
    add("--tolerance", type=float, metavar="X", help="share of the loss that counts as equal (default: 0.01)")
    add("--data-key", metavar="NAME", help="a name of data that have no contents to compare")
    add("--out", dest="folder", type=Path, metavar="DIR", help="folder of the results (default: studies/sweep)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    add("--workers", type=int, metavar="N", help="number of processes (default: 1)")
    from qsim.studies.choices import imported

    given = vars(parser.parse_args(options))
    known = {action.dest for action in parser._actions} - {"help", "config"}
    chosen = _DEFAULTS | _configured(given.pop("config", None), known) | given
    for name in ("model", "data", "points"):
        if name not in chosen:
            raise ValueError(f"sweep: --{name} is missing")
    functions = {name: imported(f"sweep: --{name}", chosen.pop(name)) for name in ("model", "data", "loss", "optimizer")}
    folder = Path(chosen.setdefault("folder", Path("studies/sweep")))
    model, data, loss, optimizer = functions.values()
    result = studies.sweep(model, data, loss, make_optimizer=optimizer, **chosen)
    print(result.report.meaning)
    print(f"report: {folder / 'report.md'}")
    return 0


def _configured(file: Path | None, known: set[str]) -> dict[str, Any]:
    """The options of a configuration file."""
    if file is None:
        return {}
    with reading("sweep", file):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"sweep: {file} must be a JSON object, got {type(found).__name__}")
    for name in found:
        if name not in known:
            raise ValueError(f"sweep: {file}: there is no option {name!r}. There are: {', '.join(sorted(known))}")
    if isinstance(points := found.get("points"), dict):
        found["points"] = {label: _read_points(own) for label, own in points.items()}
    return found


def _read_points(given: Any) -> Any:
    """A recipe from its dictionary, which has a name for its points; `sweep` reads that of points itself."""
    return Recipe.from_dict(given) if isinstance(given, dict) and "points" in given else given


def _numbers(kind: type[int] | type[float]) -> Any:
    def numbers(text: str) -> list[Any]:
        return [kind(word) for word in words(text)]

    return numbers
