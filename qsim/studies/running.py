"""Execution of the runs of a study that have no result yet, wherever their workers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from qsim.studies.measuring import machine, measured, trial
from qsim.studies.result import Result
from qsim.studies.store import Store
from qsim.studies.study import Study


@dataclass(frozen=True)
class Workers:
    """Processes that are ready to measure runs of one study, behind an executor of `concurrent.futures`.

    Attributes:
        study: The study.
        device: The device to compute on.
        devices: The devices of all workers, as in a result's metadata.
        count: The number of runs that they measure at a time.
        submit: Submits a run, given its place in the order, to an executor; None: this process measures one run after the other.
        try_out: Measures runs in turn, in one process, and returns the last result.
        errors: A context that words the errors of the executor.
    """

    study: Study[Any, Any]
    device: torch.device
    devices: frozenset[str]
    count: int = 1
    submit: Callable[[Any, int], Future[Result[Any]]] | None = None
    try_out: Callable[[Sequence[Any]], Result[Any]] | None = None
    errors: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def here(cls, study: Study[Any, Any], device: torch.device) -> Workers:
        """This process."""
        return cls(study, device, frozenset([machine(device)["device"]]))

    def results(self, runs: Sequence[Any]) -> Iterator[Result[Any]]:
        """Measure runs, which are begun in this order, and yield each result as soon as it is available."""
        if self.submit is None:
            yield from (measured(self.study, run, self.device) for run in runs)
            return
        with self.errors():
            # Futures are dropped as they finish: Dask would repeat the runs of a lost worker as long as anything refers to them.
            futures = as_completed([self.submit(run, place) for place, run in enumerate(runs)])
            for future in futures:
                yield future.result()
                del future

    def trial(self, runs: Sequence[Any]) -> Result[Any]:
        """Measure runs in turn, in one process, and return the last result."""
        with self.errors():
            return trial(self.study, runs, self.device) if self.try_out is None else self.try_out(runs)


class Engine(Protocol):
    """A way to get workers: this process, several processes, or a cluster."""

    @property
    def device(self) -> torch.device:
        """The device to compute on."""

    def ready(self, study: Study[Any, Any]) -> AbstractContextManager[Workers]:
        """Workers for a study; they end with the context."""


def carry_out(study: Study[Any, Any], todo: Sequence[Any], store: Store, engine: Engine) -> None:
    """Measure runs, and store each result as soon as it is available.

    All runs of a seed come before those of the next, so that a study which is interrupted has whole seeds. Within a seed the longest come
    first.

    Args:
        study: The study.
        todo: Its runs to measure.
        store: The store of the results; only this process writes to it.
        engine: Where to measure them.
    """
    ordered = sorted(todo, key=lambda run: (getattr(run, "seed", 0), -study.work(run)))
    with engine.ready(study) as workers, store.writing(), _bar(sum(map(study.work, todo)), len(todo)) as bar:
        for count, result in enumerate(workers.results(ordered), 1):
            store.add(result)
            bar.set_description_str(f"{count}/{len(todo)} runs", refresh=False)
            bar.update(study.work(result.run))


@dataclass(frozen=True)
class ThisProcess:
    """Measure one run after the other, here."""

    device: torch.device

    @contextmanager
    def ready(self, study: Study[Any, Any]) -> Iterator[Workers]:
        """This process, as a worker."""
        yield Workers.here(study, self.device)


def _bar(work: float, runs: int) -> Any:
    """A progress bar, on terminals only, that estimates the time left from the work of runs."""
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    return tqdm(total=work, desc=f"0/{runs} runs", disable=None, bar_format=form)
