"""From a study's name to its report: which runs there are, which of them are done, how long the others will take."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qsim.studies import named
from qsim.studies.report import Report, origin
from qsim.studies.result import Result
from qsim.studies.running import carry_out, default_workers, machine, measured
from qsim.studies.store import Part, Store
from qsim.studies.study import Study

FORMS = ("default", "quick", "full")


@dataclass(frozen=True)
class Plan:
    """A study that is about to be run.

    Attributes:
        study: Which.
        settings: Of it.
        folder: Where results, figures and the report go.
        device: Where to compute.
        workers: In how many processes.
        part: Which share of the runs.
        command: What does all this on the command line, for the report.
        form: Which of the study's forms the settings began as.
    """

    study: Study[Any, Any]
    settings: Any
    folder: Path
    device: torch.device
    workers: int
    part: Part
    command: str
    form: str = "default"

    @property
    def store(self) -> Store:
        """Where results are kept."""
        return Store(self.folder, self.study, self.part)

    @property
    def runs(self) -> list[Any]:
        """All runs, of all parts."""
        return list(self.study.runs(self.settings))

    def todo(self) -> list[Any]:
        """This part's runs that have no result yet."""
        done = self.store.results()
        return [run for run in self.runs[self.part.index - 1 :: self.part.count] if self.study.key(run) not in done]

    def estimates(self) -> dict[str, float]:
        """How many seconds each run of this part that is still to do will take, by its key.

        The time of a unit of work comes from the results that this machine has made. Without any, the run with the least work and
        the one in the middle are measured, and no result is kept.
        """
        todo = self.todo()
        if not todo:
            return {}
        here = machine(self.device)["device"]
        known = [result for result in self.store.results().values() if result.machine["device"] == here]
        known = known or [self._tried(sorted(todo, key=self.study.work))]
        unit = median(result.seconds / self.study.work(result.run) for result in known)
        return {self.study.key(run): unit * self.study.work(run) for run in todo}

    def _tried(self, ordered: Sequence[Any]) -> Result[Any]:
        """The run in the middle. The one before it pays for what is imported and compiled, and for nothing else."""
        measured(self.study, ordered[0], self.device)
        return measured(self.study, ordered[len(ordered) // 2], self.device)

    def carry_out(self) -> None:
        """Runs what is still to do."""
        todo = self.todo()
        if todo:
            carry_out(self.study, todo, self.store, self.device, self.workers)

    def missing(self) -> int:
        """How many runs, of all parts, have no result yet."""
        done = self.store.results()
        return sum(self.study.key(run) not in done for run in self.runs)

    def report(self) -> Report:
        """What the results say, once all are there.

        Raises:
            ValueError: If some are missing.
        """
        if self.missing():
            raise ValueError(f"{self.study.name}: {self.missing()} of {len(self.runs)} runs have no result in {self.folder} yet")
        return self.study.report(self.settings, self._results())

    def write(self) -> list[Path]:
        """Writes the report; see `Report.write`."""
        quick = "A quick form shows that the study runs; its verdicts are no evidence.\n\n" if self.form == "quick" else ""
        return self.report().write(self.folder, quick + origin(self.command, self._results()))

    def _results(self) -> list[Result[Any]]:
        done = self.store.results()
        return [done[self.study.key(run)] for run in self.runs]


def plan(
    study: str | Study[Any, Any],
    *,
    form: str = "default",
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    workers: int | None = 1,
    part: str | Part = "1/1",
    command: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Makes ready to run a study.

    Args:
        study: Its name, or a study of your own.
        form: `"default"`, `"quick"` for a look in seconds, or `"full"` for a GPU.
        out: Where results, figures and the report go; `studies/NAME` unless given, with the form behind it if that is not the default.
        device: Where to compute; the GPU if there is one and the form is full, else the processor.
        workers: How many processes; None: one for each core or GPU. With several, the calling script must be safe to import.
        part: Which share of the runs, such as `"2/4"`.
        command: What the report names as its origin.
        settings: What to choose otherwise than the form does, by the names of the study's settings.

    Raises:
        ValueError: If there is no such study, form, setting or device.

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
    where = _device(device, form)
    if workers is not None and workers < 1:
        raise ValueError(f"workers: must be at least 1, got {workers}")
    folder = Path(out) if out is not None else Path("studies") / (found.name if form == "default" else f"{found.name}-{form}")
    return Plan(
        found,
        replace(base, **(settings or {})),
        folder,
        where,
        default_workers(where) if workers is None else workers,
        Part.parse(part) if isinstance(part, str) else part,
        command or f"qsim study {shlex.quote(found.name)}{'' if form == 'default' else f' --{form}'}",
        form,
    )


def run(study: str | Study[Any, Any], **options: Any) -> Report:
    """Runs a study, as far as it is not done yet, and writes its report.

    Args:
        study: Its name, or a study of your own.
        **options: Those of `plan`.

    Returns:
        The report; `report.meaning` is its sentence, `report.claims` are what the paper says and what came out.

    Raises:
        ValueError: If the options make no sense, or results of other parts are missing.

    Example:
        >>> import tempfile
        >>> from qsim import studies
        >>> report = studies.run("formats", form="quick", settings={"steps": 2}, out=tempfile.mkdtemp())
        >>> report.study.question
        'How many bits does a net need, and where: exponent or mantissa?'
    """
    prepared = plan(study, **options)
    prepared.carry_out()
    report = prepared.report()
    prepared.write()
    return report


def _device(device: str | torch.device | None, form: str) -> torch.device:
    if device is None:
        return torch.device("cuda" if form == "full" and torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: must be cpu, cuda or cuda:N; got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: must be cpu, cuda or cuda:N; got {device!r}")
    if found.type == "cuda" and not (torch.cuda.is_available() and (found.index or 0) < torch.cuda.device_count()):
        raise ValueError(f"device: {device} was asked for, but this machine has {torch.cuda.device_count()} GPUs")
    return found
