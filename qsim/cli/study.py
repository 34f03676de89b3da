"""`qsim study NAME`: run an experiment and write its figures and its report."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim import studies
from qsim.cli.sweep import sweep
from qsim.cli.text import terminal_width
from qsim.text.columns import aligned

if TYPE_CHECKING:
    from qsim.studies import Plan, Study

HELP = "run an experiment"
DESCRIPTION = "Run a study: all runs, figures, and a report with a verdict on each of a paper's claims."
EXAMPLES = """\
examples:
  qsim study                               list the studies
  qsim study batch-size                    in minutes on two cores, with bundled data
  qsim study batch-size --help             the options of this one
  qsim study batch-size --dry-run          the runs, and how long they will take
  qsim study batch-size --full --workers 4 --data fashion-mnist/
  qsim study sweep --model mymodule:make --data mymodule:data --points mxfp8,mxfp4   a model of your own
  qsim study batch-size --scheduler tcp://10.0.0.1:8786   on the workers of a Dask cluster

An interrupted study continues where it stopped.
"""
#: Options that determine where results are computed and stored, but not which: a report's command does not name them.
_OF_THIS_MACHINE = ("--out", "--scheduler", "--workers")
_NEEDED = ("matplotlib", "scipy", "sklearn", "tqdm", "filelock")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("name", nargs="?", metavar="NAME", help="a study; without one, all are listed")
    command.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    _check_installed()
    if args.name is None:
        rows = [[study.name, study.question, study.source] for study in map(studies.named, studies.names())]
        print(aligned([*rows, ["sweep", "What does rounding cost your own model?", ""]], width=terminal_width()))
        return 0
    if args.name == "sweep":
        return sweep(args.options)
    study = studies.named(args.name)
    chosen = _read(study, args.options)
    plan = _plan(study, chosen, args.options)
    if chosen.dry_run:
        # With a budget of seeds: what will run at most.
        largest = plan.at(plan.looks.seeds[-1]) if plan.looks.seeds else plan
        lacks_gpu = chosen.form == "full" and chosen.device is None and plan.engine.device.type == "cpu"
        (_print_runs if lacks_gpu else _print_plan)(largest)
        return 0
    _show(plan.decided())
    return 0


def planned_study(name: str, options: list[str]) -> Plan:
    """The plan of `qsim study` with a name and options.

    Example:
        >>> planned_study("batch-size", ["--seeds", "2", "--out", "results"]).command
        'qsim study batch-size --seeds 2'
    """
    study = studies.named(name)
    return _plan(study, _read(study, options), options)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"studies need {', '.join(missing)}: pip install 'qsim-torch[study]'")


def _read(study: Study[Any, Any], words: list[str]) -> argparse.Namespace:
    from qsim.studies import choices

    parser = argparse.ArgumentParser(
        prog=f"qsim study {study.name}", description=f"{study.question} Source: {study.source}.", allow_abbrev=False
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", dest="form", action="store_const", const="quick", help="a reduced form that tests the study in seconds")
    form.add_argument("--full", dest="form", action="store_const", const="full", help="settings for a GPU")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results, figures and the report (default: studies/NAME)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda with --full if available, else cpu)")
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes (default: one for each core, or for each GPU)")
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="submit the runs to this Dask scheduler, such as tcp://10.0.0.1:8786, instead"
    )
    parser.add_argument("--most-seeds", type=int, metavar="N", help="add seeds until every claim is decided, at most this many")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and the time they will take")
    parser.set_defaults(form="default")
    settings = parser.add_argument_group("settings of this study, with their defaults on a CPU")
    choices.add_options(settings, study.settings())
    return parser.parse_args(words)


def _plan(study: Study[Any, Any], chosen: argparse.Namespace, options: list[str]) -> Plan:
    from qsim.studies import choices

    return studies.plan(
        study,
        form=chosen.form,
        out=chosen.out,
        device=chosen.device,
        workers=chosen.workers,
        scheduler=chosen.scheduler,
        command=shlex.join(["qsim", "study", study.name, *_without(_OF_THIS_MACHINE, options)]),
        settings=choices.given(chosen, study.settings()),
        most_seeds=chosen.most_seeds,
    )


def _without(names: Sequence[str], words: list[str]) -> list[str]:
    """The words without some options and their values."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in names and word not in names and word.partition("=")[0] not in names
    ]


def _print_plan(plan: Plan) -> None:
    """Print the runs and their estimated times."""
    todo, found = plan.todo(), plan.estimate()
    for run in todo:
        print(f"{found.seconds[plan.study.key(run)]:>8.1f} s  {_named(run)}")
    basis = f", {found.basis}" if found.basis else ""
    print(f"{_counted(plan, todo)}; about {_duration(found.total)} on {plan.engine.device} with {found.at_once} at a time{basis}")


def _print_runs(plan: Plan) -> None:
    """Print the runs of a full form on a machine without a GPU, where a single one can take days."""
    todo = plan.todo()
    for run in todo:
        print(_named(run))
    print(f"{_counted(plan, todo)}; no time is estimated, because --full is for a GPU and this machine has none (--device cpu measures it)")


def _counted(plan: Plan, todo: Sequence[Any]) -> str:
    return f"{len(todo)} runs to do, {len(plan.runs) - len(todo)} done"


def _named(run: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(run).items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _show(plan: Plan) -> None:
    """Write the report, and print its verdicts."""
    report = plan.report()
    page, *pictures = plan.write()
    for claim in report.claims:
        print(f"{claim.source}: {claim.paper}\n  measured: {claim.measured}\n  agrees: {claim.verdict}")
    print(f"\n{report.meaning}\n")
    print("\n".join(f"figure: {picture}" for picture in pictures))
    print(f"report: {page}")
    sys.stdout.flush()
