"""From a study's name to its report: the runs, which of them are done, and how long the others will take."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qsim.studies import named, names
from qsim.studies.looks import ONE_LOOK, Looks
from qsim.studies.processes import Processes, default_count
from qsim.studies.report import Report, provenance
from qsim.studies.result import Result
from qsim.studies.running import Engine, ThisProcess, carry_out
from qsim.studies.statistics import confidence
from qsim.studies.store import Store
from qsim.studies.study import Study

FORMS = ("default", "quick", "full")


@dataclass(frozen=True)
class Duration:
    """The time that runs will take.

    Attributes:
        seconds: Seconds of each run, by its key.
        at_once: Number of runs at a time.
        basis: Measurements from which the seconds are extrapolated.

    Example:
        >>> Duration({"a": 3.0, "b": 2.0, "c": 1.0}, at_once=4).total
        3.0
    """

    seconds: Mapping[str, float]
    at_once: int
    basis: str = ""

    @property
    def total(self) -> float:
        """Seconds until all are done."""
        share = min(self.at_once, max(1, len(self.seconds)))
        return max(sum(self.seconds.values()) / share, max(self.seconds.values(), default=0.0))


@dataclass(frozen=True)
class Plan:
    """A study with everything that is needed to run it.

    Attributes:
        study: The study.
        settings: Its settings.
        folder: Where results, figures and the report go.
        engine: Where runs are measured: this process, several processes, or a cluster.
        command: Equivalent command line, for the report.
        form: Form of the study on which the settings are based.
        looks: Numbers of seeds after which verdicts are looked at, if seeds are added until they are decided.

    Example:
        >>> from qsim import studies
        >>> plan = studies.plan("batch-size", form="quick")
        >>> plan.study.name, plan.form, len(plan.runs) > 0
        ('batch-size', 'quick', True)
    """

    study: Study[Any, Any]
    settings: Any
    folder: Path
    engine: Engine
    command: str
    form: str = "default"
    looks: Looks = ONE_LOOK

    @property
    def store(self) -> Store:
        """Store of the results."""
        return Store(self.folder, self.study)

    @property
    def runs(self) -> list[Any]:
        """All runs."""
        return list(self.study.runs(self.settings))

    def todo(self) -> list[Any]:
        """Runs that have no result yet."""
        done = self.store.results()
        return [run for run in self.runs if self.study.key(run) not in done]

    def estimate(self) -> Duration:
        """Time that the runs that are still to do will take.

        The time per unit of work comes from results of the same kind of machine. Without any, the run with the least work and
        the one in the middle are measured; their results are not kept.
        """
        todo = sorted(self.todo(), key=self.study.work)
        with self.engine.ready(self.study) as workers:
            if not todo:
                return Duration({}, workers.count)
            known = [result for result in self.store.results().values() if result.machine["device"] in workers.devices]
            basis = f"from {len(known)} results of this kind of machine"
            if not known:
                # The first only pays for imports and compilation.
                known = [workers.trial([todo[0], todo[len(todo) // 2]])]
                basis = f"extrapolated from one run of {known[0].seconds:.2g} s"
            unit = median(result.seconds / self.study.work(result.run) for result in known)
            return Duration({self.study.key(run): unit * self.study.work(run) for run in todo}, workers.count, basis)

    def carry_out(self) -> None:
        """Execute the runs that are still to do."""
        todo = self.todo()
        if todo:
            carry_out(self.study, todo, self.store, self.engine)

    def at(self, seeds: int) -> Plan:
        """The same plan with another number of seeds."""
        return replace(self, settings=replace(self.settings, seeds=seeds))

    def decided(self) -> Plan:
        """Execute the runs, and add seeds until every claim is decided or no look is left.

        Returns:
            The plan with the number of seeds at which this ended.
        """
        reached = self
        for seeds in self.looks.seeds or (self.settings.seeds,):
            reached = self.at(seeds)
            reached.carry_out()
            if all(claim.agrees is not None for claim in reached.report().claims):
                break
        return reached

    def missing(self) -> int:
        """Number of runs that have no result yet."""
        return len(self.todo())

    def report(self) -> Report:
        """The report, once all results exist.

        Raises:
            ValueError: If results are missing.
        """
        if self.missing():
            raise ValueError(f"{self.study.name}: {self.missing()} of {len(self.runs)} runs have no result in {self.folder} yet")
        with confidence(self.looks.confidence):
            return self.study.report(self.settings, self.results())

    def write(self) -> list[Path]:
        """Write the report; see `Report.write`."""
        quick = "The quick form only shows that the study runs; its verdicts are not evidence.\n\n" if self.form == "quick" else ""
        rule = f"{self.looks.described(self.settings.seeds)}\n\n" if self.looks.seeds else ""
        # Figures compute their intervals when they are drawn.
        with confidence(self.looks.confidence):
            return self.report().write(self.folder, quick + rule + provenance(self.command, self.results()))

    def results(self) -> list[Result[Any]]:
        """Results of all runs, which must be done."""
        done = self.store.results()
        return [done[self.study.key(run)] for run in self.runs]


def plan(
    study: str | Study[Any, Any],
    *,
    form: str = "default",
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    workers: int | None = 1,
    scheduler: str | None = None,
    command: str | None = None,
    settings: Mapping[str, Any] | None = None,
    most_seeds: int | None = None,
) -> Plan:
    """Prepare a study for running.

    Args:
        study: Its name, or a study of your own.
        form: `"default"`, `"quick"` for a test in seconds, or `"full"` for a GPU.
        out: The folder of results, figures and the report. The default is `studies/NAME`, with the form appended if it is not the default.
        device: The device to compute on; by default, the full form uses a GPU if there is one or a scheduler is given, and the others
            the CPU.
        workers: The number of processes; None: one for each core or GPU. With several, the calling script must be safe to import.
        scheduler: The address of a Dask scheduler whose workers measure the runs, instead of processes of this machine.
        command: The command that the report gives as its origin; by default `qsim study NAME`, or the call of `qsim.studies.run` where the
            command line has no such study.
        settings: Values that override those of the form, by the names of the study's settings.
        most_seeds: Add seeds until every claim is decided, but not more than this: the number is doubled each time, beginning with the
            setting `seeds`, and intervals are wider, so that they stay valid.

    Raises:
        ValueError: If the study, the form, a setting or the device does not exist.

    Example:
        >>> from qsim import studies
        >>> len(studies.plan("batch-size", settings={"seeds": 1, "formats": ("e4m1",)}).runs) > 0
        True
    """
    found = named(study) if isinstance(study, str) else study
    if form not in FORMS:
        raise ValueError(f"form: must be one of {', '.join(FORMS)}; got {form!r}")
    base = found.settings() if form == "default" else getattr(found, form)()
    known = {setting.name for setting in fields(base)}
    for name in settings or {}:
        if name not in known:
            raise ValueError(f"{found.name} has no setting {name!r}. It has: {', '.join(sorted(known))}")
    chosen = replace(base, **(settings or {}))
    if chosen.seeds < 1:
        raise ValueError(f"seeds: must be at least 1, got {chosen.seeds}")
    timed = found.timed(chosen)
    engine = _local(device, form, workers, timed=timed) if scheduler is None else _cluster(scheduler, device, form, workers)
    folder = Path(out) if out is not None else Path("studies") / (found.name if form == "default" else f"{found.name}-{form}")
    return Plan(
        found,
        chosen,
        folder,
        engine,
        command or _origin(found, form, settings, most_seeds),
        form,
        ONE_LOOK if most_seeds is None else Looks.doubling(chosen.seeds, most_seeds),
    )


def run(study: str | Study[Any, Any], **options: Any) -> Report:
    """Run a study, except for runs that have results already, and write its report.

    Args:
        study: Its name, or a study of your own.
        **options: The options of `plan`.

    Returns:
        The report; `report.meaning` is its result in one sentence, `report.claims` are the paper's claims with verdicts.

    Raises:
        ValueError: If the options are invalid.

    Example:
        >>> import tempfile
        >>> from qsim import studies
        >>> report = studies.run("formats", form="quick", settings={"steps": 2}, out=tempfile.mkdtemp())
        >>> report.study.question
        'How many bits does a net need, and where: exponent or mantissa?'
    """
    reached = plan(study, **options).decided()
    reached.write()
    return reached.report()


def _origin(study: Study[Any, Any], form: str, settings: Mapping[str, Any] | None, most_seeds: int | None) -> str:
    """The command that repeats a study, or the call if the command line does not have the study, or was not given its settings."""
    is_known = study.name in names() and type(study) is type(named(study.name))
    if is_known and not settings and most_seeds is None:
        return f"qsim study {shlex.quote(study.name)}{'' if form == 'default' else f' --{form}'}"
    options = {"form": None if form == "default" else form, "settings": dict(settings or {}) or None, "most_seeds": most_seeds}
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    chosen = repr(study.name) if is_known else f"{type(study).__name__}()"
    return f"qsim.studies.run({', '.join([chosen, *given])})"


def _local(device: str | torch.device | None, form: str, workers: int | None, *, timed: bool) -> Engine:
    where = _parsed("cuda" if form == "full" and torch.cuda.is_available() else "cpu") if device is None else _parsed(device)
    if where.type == "cuda" and not (torch.cuda.is_available() and (where.index or 0) < torch.cuda.device_count()):
        raise ValueError(f"device: {device} was asked for, but this machine has {torch.cuda.device_count()} GPUs")
    if workers is not None and workers < 1:
        raise ValueError(f"workers: must be at least 1, got {workers}")
    count = default_count(where) if workers is None else workers
    if timed and where.type == "cuda" and count > default_count(where):
        raise ValueError(
            f"workers: must be at most {default_count(where)}, one for each GPU, because the study measures times; got {count}"
        )
    return ThisProcess(where) if count == 1 else Processes(where, count)


def _cluster(scheduler: str, device: str | torch.device | None, form: str, workers: int | None) -> Engine:
    from qsim.studies.cluster import Cluster

    where = _parsed(device or ("cuda" if form == "full" else "cpu"))
    if ":" in str(where):
        raise ValueError(f"device: must be cpu or cuda with a scheduler, whose workers have one GPU each; got {device}")
    if workers not in (None, 1):
        raise ValueError(f"workers: a scheduler has its own; got {workers}")
    return Cluster(scheduler, where)


def _parsed(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: must be cpu, cuda or cuda:N; got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: must be cpu, cuda or cuda:N; got {device!r}")
    return found
