"""Points, batch sizes and learning rates compared on a model and data of your own."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import qsim
from qsim import FivePoint
from qsim.diagnostics import Advice, Monitor
from qsim.functional.quantizer import GRADIENTS
from qsim.recipes import Recipe
from qsim.recipes.points_of import PointsLike
from qsim.studies.learners.training import full_precision
from qsim.studies.plans import plan
from qsim.studies.report import Report
from qsim.studies.result import Result
from qsim.studies.study import Run, TrialStudy
from qsim.studies.sweeps.fingerprints import fingerprint
from qsim.studies.sweeps.repeat import write_configuration
from qsim.studies.sweeps.results import DESIGNS, STEPS, Settings, Sweep
from qsim.studies.sweeps.sources import Loss, MakeOptimizer, Sources

__all__ = ["Settings", "Sources", "Sweep", "SweepStudy", "sweep"]

#: Anything that `convert` takes for a whole model; None is full precision.
Points = PointsLike

FULL = "full precision"
#: The share of the reference's loss by which another may differ and still count as equal.
TOLERANCE = 0.01


def sweep(
    make_model: Callable[[], nn.Module],
    data: Any,
    loss: Loss,
    *,
    points: Mapping[str, Points] | Sequence[str],
    batches: Sequence[int] = (64,),
    rates: Sequence[float] = (1e-3,),
    steps: int = 300,
    seeds: int = 4,
    designs: Sequence[str] = (STEPS,),
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    tolerance: float = TOLERANCE,
    data_key: str | None = None,
    folder: str | Path = "studies/sweep",
    device: str | torch.device | None = None,
    workers: int | None = 1,
    scheduler: str | None = None,
) -> Sweep:
    """Train your own model with every combination of points, batch sizes and learning rates, and judge the differences.

    Formats, roundings, accumulators, random bits and recipes are all values of `points`. Results are stored as they are measured: an
    interrupted sweep continues where it stopped, and a larger grid measures only what is new. Results of other points, of functions that do
    something else, and of other data are measured again: functions count with their code and the variables that they read, data with their
    contents. Another version of Python compiles functions to other code.

    Args:
        make_model: A function that makes a model, with weights that depend on torch's seed only.
        data: Four tensors (inputs, targets, test inputs, test targets), two datasets or loaders of pairs (training, test), or a function
            that returns them. A loader's `batch_size` is replaced.
        loss: A function of a model's output and targets that returns a mean.
        points: What the sweep compares, by labels: a `FivePoint`, a recipe, its name, or None for full precision. The first one is the
            reference; without any that is None, full precision is. A list of recipes' names has them as labels.
        batches: The numbers of examples per update.
        rates: Learning rates; each combination is judged at its best.
        steps: The number of updates.
        seeds: The number of seeds, at least two for intervals.
        designs: What all batch sizes have in common: `"steps"`, the number of updates; `"examples"`, the number of examples, so that a
            batch twice as large has half as many updates, and the middle one `steps`; or both.
        make_optimizer: A function of parameters and a learning rate.
        tolerance: The share of the reference's loss that points may add and still count as equal.
        data_key: A name of the data by which results are stored, for data that have no contents to compare, such as an open connection,
            or too many. Change it when the data change.
        folder: The folder of results, figures and the report.
        device: The device to compute on; by default a CPU.
        workers: The number of processes; None: one for each core or GPU. With several, functions must be importable.
        scheduler: The address of a Dask scheduler, whose workers measure the runs.

    Returns:
        The results, with `frame()`, `added(label, batch)` and `report`, which is also written to the folder.

    Raises:
        TypeError: If the data or a function has the wrong type, or contents that cannot be identified.
        ValueError: If the grid is empty or not positive, the tolerance negative, there are no examples, inputs and targets differ in
            number, points round nothing in the model, or `make_model` returns the same parameters twice.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> result = studies.sweep(
        ...     lambda: torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        ...     (x, x**2, x, x**2), torch.nn.functional.mse_loss,
        ...     points=["mxfp4"], batches=[16, 32], steps=5, seeds=2, folder=tempfile.mkdtemp(),
        ... )
        >>> result.settings.labels, len(result.rows())
        (('full precision', 'mxfp4'), 8)
    """
    labelled: dict[str, Points] = dict(points) if isinstance(points, Mapping) else {name: name for name in points}
    labelled = {name: FivePoint.from_dict(chosen) if isinstance(chosen, Mapping) else chosen for name, chosen in labelled.items()}
    if None not in labelled.values():
        labelled = {FULL: None, **labelled}
    for name, function in (("make_model", make_model), ("loss", loss), ("make_optimizer", make_optimizer)):
        if not callable(function):
            raise TypeError(f"sweep: {name} must be a function, got {type(function).__name__}")
    for name, values in (("batches", batches), ("rates", rates), ("steps", steps), ("seeds", seeds)):
        check_positive(name, values)
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"sweep: tolerance must be a share of the loss, 0 or more, got {tolerance}")
    if not designs or not set(designs) <= set(DESIGNS):
        raise ValueError(f"sweep: designs must be of {', '.join(DESIGNS)}, got {list(designs)}")
    grid = tuple(sorted(set(batches))), tuple(rates), steps, seeds, tolerance, tuple(dict.fromkeys(designs))
    settings = Settings(tuple(labelled), *grid)
    sources = Sources(make_model, data, loss, make_optimizer, data_key)
    sources.datasets()
    sources.check_model()
    with torch.random.fork_rng(devices=[]):
        for label, chosen in labelled.items():
            if chosen is not None:
                _check_points(label, qsim.convert(make_model(), chosen))  # raises an error for an unknown name or points that do not suit
    study = SweepStudy(sources, labelled, settings)
    prepared = plan(study, out=folder, device=device, workers=workers, scheduler=scheduler)
    prepared.carry_out()
    replace(prepared, command=write_configuration(Path(folder), sources, labelled, settings)).write()
    return study.results(settings, prepared.results())


def check_positive(name: str, given: Any) -> None:
    """Raise an error unless a setting of a sweep, a number or a list of numbers, is above zero and, except for rates, integer."""
    values = given if name in ("batches", "rates") else [given]
    if name != "rates" and not all(isinstance(value, int) for value in values):
        raise TypeError(f"sweep: {name} must be {'integers' if name == 'batches' else 'an integer'}, got {given}")
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"sweep: {name} must be positive, got {given}")


def _check_points(label: str, model: nn.Module) -> None:
    try:
        Monitor(model)
    except ValueError as error:
        raise ValueError(f"sweep: {label} rounds nothing in this model: qsim.nn.conversion(model) says what it has") from error


class SweepStudy(TrialStudy[Settings]):
    """Train a caller's model with all combinations of points, batch sizes and learning rates.

    Args:
        sources: The model, data and loss.
        points: The points by their labels; the first are those that the others are compared with.
        settings: The grid.
    """

    name, question, source = "sweep", "What does rounding cost this model?", "a model of your own"
    #: Since the second, a run says which share of its gradients underflows.
    version = 2

    def __init__(self, sources: Sources, points: Mapping[str, Points], settings: Settings) -> None:
        self._sources, self._points, self._given = sources, dict(points), settings
        self._digest, self._described = sources.digest(), sources.described(settings.rates[0])

    def settings(self) -> Settings:  # type: ignore[override]
        """The grid."""
        return self._given

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """All combinations; `points` and `sources` make a result of other points or another model another run."""
        for (label, points), batch, rate, design in product(self._points.items(), settings.batches, settings.rates, settings.designs):
            way = {"label": label, "batch": batch, "rate": rate, "steps": settings.updates(design, batch)}
            yield {**way, "points": _text(points), "sources": self._digest}

    def work(self, run: Run) -> float:
        """A constant per step, plus a term per example."""
        return float(run.steps * (100 + run.batch) * (1 if self._points[run.label] is None else 2))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train the model; return its losses, and what a monitor finds in the last step: the worst problem, and underflow of gradients."""
        train, test, collate = self._sources.datasets()
        torch.manual_seed(run.seed)
        model = self._sources.make_model().to(device)
        if (points := self._points[run.label]) is not None:
            qsim.convert(model, points)
        optimizer = self._sources.make_optimizer(model.parameters(), run.rate)
        batches = _batches(train, collate, run, device)
        recent, problems = [], Advice((), None)
        with full_precision(device):
            for step in range(1, run.steps + 1):
                with Monitor(model) if points is not None and step == run.steps else nullcontext() as monitor:
                    value = _step(model, optimizer, self._sources.loss, next(batches))
                    problems = problems if monitor is None else _problems(monitor)
                if step > 0.9 * run.steps:
                    recent.append(value)
            return {
                "test_loss": self._tested(model, test, collate, device),
                "training_loss": float(torch.stack(recent).mean()),
                "problem": next(map(str, problems), ""),
                "underflow": max((each.share for each in problems if each.outcome == "underflow" and each.point in GRADIENTS), default=0.0),
            }

    @torch.no_grad()
    def _tested(self, model: nn.Module, test: Dataset[Any], collate: Callable[[list[Any]], Any], device: torch.device) -> float:
        model.eval()
        total, count = 0.0, 0
        for x, y in DataLoader(test, batch_size=512, collate_fn=collate):
            total += float(self._sources.loss(model(_moved(x, device)), _moved(y, device))) * len(y)
            count += len(y)
        return total / count

    def report(self, settings: Settings, results: Sequence[Result[Run]]) -> Report:
        """Losses with intervals, and a verdict on each difference from the reference."""
        return self.results(settings, results).report

    def results(self, settings: Settings, results: Sequence[Result[Run]]) -> Sweep:
        """The results, with what was trained in words."""
        return Sweep(self, settings, results, self._described)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: tuple[Any, Any]) -> Tensor:
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value.detach()


def _problems(monitor: Monitor) -> Advice:
    """The problems of a step, the worst first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says it
        monitor.step()
    return monitor.advice()


def _batches(data: Dataset[Any], collate: Callable[[list[Any]], Any], run: Run, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """The batches of a run, drawn with replacement by its seed only, so that all points see the same examples."""
    order = torch.Generator().manual_seed(run.seed)
    for _ in range(run.steps):
        chosen = torch.randint(len(data), (run.batch,), generator=order)  # type: ignore[arg-type]
        if isinstance(data, TensorDataset):
            x, y = data[chosen]
        else:
            x, y = collate([data[int(index)] for index in chosen])
        yield _moved(x, device), _moved(y, device)


def _moved(x: Any, device: torch.device) -> Any:
    return x.to(device) if hasattr(x, "to") else x


def _text(points: Points) -> str:
    """Points as text, which is different for different ones."""
    if isinstance(points, FivePoint | Recipe):
        try:
            return json.dumps(points.to_dict(), sort_keys=True)
        except ValueError:  # callables, which plain values cannot express
            return f"{points} ({fingerprint(points, 'points')})"
    return str(points)
