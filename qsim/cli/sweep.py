"""`qsim study sweep`: points, batch sizes and learning rates on a model of a caller's module."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from qsim import studies

_EXAMPLE = """\
example:
  qsim study sweep --model mymodule:make --data mymodule:data --points mxfp8,mxfp4 --batches 16,64,256

make() returns a model; data() returns inputs, targets, test inputs and test targets, or two datasets. Points that have no name are for
qsim.studies.sweep, the same in Python.
"""


def sweep(words: list[str]) -> int:
    """Run the command with these options."""
    parser = argparse.ArgumentParser(
        prog="qsim study sweep",
        description="Train a model of your own with every combination of points, batch sizes and learning rates.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="a function that makes the model")
    parser.add_argument("--data", required=True, metavar="MODULE:FUNCTION", help="a function that returns training and test data")
    parser.add_argument("--loss", default="torch.nn.functional:cross_entropy", metavar="MODULE:FUNCTION", help="default: %(default)s")
    parser.add_argument("--optimizer", default="torch.optim:AdamW", metavar="MODULE:FUNCTION", help="default: %(default)s")
    parser.add_argument("--points", required=True, type=_words, metavar="A,B", help="recipes to compare with full precision")
    parser.add_argument("--batches", default=(64,), type=_numbers(int), metavar="A,B", help="examples per update (default: 64)")
    parser.add_argument("--rates", default=(1e-3,), type=_numbers(float), metavar="A,B", help="learning rates (default: 0.001)")
    parser.add_argument("--steps", default=300, type=int, metavar="N", help="number of updates (default: 300)")
    parser.add_argument("--seeds", default=4, type=int, metavar="N", help="number of seeds (default: 4)")
    parser.add_argument("--out", default="studies/sweep", type=Path, metavar="DIR", help="folder of the results (default: studies/sweep)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--workers", default=1, type=int, metavar="N", help="number of processes (default: 1)")
    chosen = parser.parse_args(words)
    result = studies.sweep(
        _imported("model", chosen.model),
        _imported("data", chosen.data),
        _imported("loss", chosen.loss),
        points=chosen.points,
        batches=chosen.batches,
        rates=chosen.rates,
        steps=chosen.steps,
        seeds=chosen.seeds,
        make_optimizer=_imported("optimizer", chosen.optimizer),
        folder=chosen.out,
        device=chosen.device,
        workers=chosen.workers,
    )
    print(result.report.meaning)
    print(f"report: {chosen.out / 'report.md'}")
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(kind: type[int] | type[float]) -> Any:
    def numbers(text: str) -> list[Any]:
        return [kind(word) for word in _words(text)]

    return numbers


def _imported(option: str, place: str) -> Any:
    """A function from the text `module:function`; modules of the current folder are found."""
    module, separator, name = place.partition(":")
    if not separator or not module or not name:
        raise ValueError(f"sweep: --{option} must be MODULE:FUNCTION, got {place!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"sweep: --{option}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"sweep: --{option}: the module {module} has no {name!r}") from error
