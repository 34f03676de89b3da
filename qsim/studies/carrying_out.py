"""From a study's name to its report: the runs, which of them are done, and how long the others will take."""

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
    """A study with everything that is needed to run it.

    Attributes:
        study: The study.
        settings: Its settings.
        folder: Where results, figures and the report go.
        device: The device to compute on.
        workers: The number of processes.
        part: The share of the runs.
        command: The equivalent command line, for the report.
        form: The form of the study on which the settings are based.

    Example:
        >>> from qsim import studies
        >>> plan = studies.plan("batch-size", form="quick")
        >>> plan.study.name, plan.form, len(plan.runs) > 0
        ('batch-size', 'quick', True)
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
        """The store of the results."""
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
        """Estimated seconds of each run of this part that is still to do, by its key.

        The time per unit of work comes from results of this machine. Without any, the run with the least work and
        the one in the middle are measured; their results are not kept.
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
        """The run in the middle. The one before it only pays for imports and compilation."""
        measured(self.study, ordered[0], self.device)
        return measured(self.study, ordered[len(ordered) // 2], self.device)

    def carry_out(self) -> None:
        """Execute the runs that are still to do."""
        todo = self.todo()
        if todo:
            carry_out(self.study, todo, self.store, self.device, self.workers)

    def missing(self) -> int:
        """The number of runs, of all parts, that have no result yet."""
        done = self.store.results()
        return sum(self.study.key(run) not in done for run in self.runs)

    def report(self) -> Report:
        """The report, once all results exist.

        Raises:
            ValueError: If results are missing.
        """
        if self.missing():
            raise ValueError(f"{self.study.name}: {self.missing()} of {len(self.runs)} runs have no result in {self.folder} yet")
        return self.study.report(self.settings, self._results())

    def write(self) -> list[Path]:
        """Write the report; see `Report.write`."""
        quick = "The quick form only shows that the study runs; its verdicts are not evidence.\n\n" if self.form == "quick" else ""
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
    """Prepare a study for running.

    Args:
        study: Its name, or a study of your own.
        form: `"default"`, `"quick"` for a test in seconds, or `"full"` for a GPU.
        out: The folder of results, figures and the report. The default is `studies/NAME`, with the form appended if it is not the default.
        device: The device to compute on; by default, the full form uses a GPU if there is one, and the others the CPU.
        workers: The number of processes; None: one for each core or GPU. With several, the calling script must be safe to import.
        part: The share of the runs, such as `"2/4"`.
        command: The command that the report gives as its origin.
        settings: Values that override those of the form, by the names of the study's settings.

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
    """Run a study, except for runs that have results already, and write its report.

    Args:
        study: Its name, or a study of your own.
        **options: The options of `plan`.

    Returns:
        The report; `report.meaning` is its result in one sentence, `report.claims` are the paper's claims with verdicts.

    Raises:
        ValueError: If the options are invalid, or results of other parts are missing.

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
