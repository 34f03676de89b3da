"""The measurement of one run: in one thread, timed, with the machine and the versions that computed it."""

from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import qsim
import qsim_kernels
from qsim.studies.result import Result
from qsim.studies.study import Study


def measured(study: Study[Any, Any], run: Any, device: torch.device) -> Result[Any]:
    """Measure and time one run, in one thread, so that sums do not depend on the number of cores."""
    begin = time.perf_counter()
    with _one_thread():
        values = study.measure(run, device)
    return Result(run, values, time.perf_counter() - begin, machine(device))


def trial(study: Study[Any, Any], runs: Sequence[Any], device: torch.device) -> Result[Any]:
    """Measure runs in turn and return the last result: the first run also pays for imports and compilation."""
    return [measured(study, run, device) for run in runs][-1]


def machine(device: torch.device) -> dict[str, str]:
    """The metadata of a result: machine, date and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    own = {"python": platform.python_version(), "qsim": qsim.__version__, "commit": _commit()}
    return {"device": name, "torch": torch.__version__, **own, "date": datetime.date.today().isoformat()}


@cache
def versions() -> dict[str, str]:
    """The versions on which results depend. Builds of torch for a CPU and for a GPU have one version.

    Example:
        >>> list(versions())
        ['Python', 'torch', 'qsim', "qsim's sources"]
    """
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "qsim": qsim.__version__,
        "qsim's sources": _digest(),
    }


@cache
def _commit() -> str:
    """The commit of the clone from which qsim is imported; empty if it is installed."""
    git = ["git", "-C", str(Path(qsim.__file__).parent)]
    options: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
    try:
        # Without this, it could be the commit of a project in whose folder qsim is installed.
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], **options)
        return str(subprocess.run([*git, "describe", "--always", "--dirty", "--exclude=*"], **options).stdout).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _digest() -> str:
    """A digest of qsim's files: between releases, several commits have one version."""
    found = hashlib.sha256()
    for package in (qsim, qsim_kernels):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            found.update(file.relative_to(root).as_posix().encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"one core of {name}"
