"""Execution of the runs of a study that have no result yet: in this process or in several, on a CPU or on GPUs."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm

import qsim
from qsim.studies.result import Result
from qsim.studies.store import Store
from qsim.studies.study import Study


def carry_out(study: Study[Any, Any], todo: Sequence[Any], store: Store, device: torch.device, workers: int) -> None:
    """Measure runs, and store each result as soon as it is available.

    Args:
        study: The study.
        todo: Its runs to measure.
        store: The store of the results; only this process writes to it.
        device: The device to compute on. Without a GPU index, several workers are distributed over the GPUs.
        workers: The number of processes; 1: only this one.
    """
    longest_first = sorted(todo, key=study.work, reverse=True)
    with store.writing(), _bar(sum(map(study.work, todo)), len(todo)) as bar:
        results = _here(study, longest_first, device) if workers == 1 else _in_processes(study, longest_first, device, workers)
        for result in results:
            store.add(result)
            bar.done(study.work(result.run))


def measured(study: Study[Any, Any], run: Any, device: torch.device) -> Result[Any]:
    """Measure and time one run, in one thread, so that sums do not depend on the number of cores."""
    begin = time.perf_counter()
    with _one_thread():
        values = study.measure(run, device)
    return Result(run, values, time.perf_counter() - begin, machine(device))


def machine(device: torch.device) -> dict[str, str]:
    """The metadata of a result: machine, date and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": name, "torch": torch.__version__, "qsim": qsim.__version__, "date": datetime.date.today().isoformat()}


def default_workers(device: torch.device) -> int:
    """One process for each core or GPU."""
    if device.type == "cuda":
        return torch.cuda.device_count() if str(device) == "cuda" else 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _here(study: Study[Any, Any], todo: Sequence[Any], device: torch.device) -> Iterator[Result[Any]]:
    for run in todo:
        yield measured(study, run, device)


def _in_processes(study: Study[Any, Any], todo: Sequence[Any], device: torch.device, workers: int) -> Iterator[Result[Any]]:
    context = _context(study)
    numbers = context.SimpleQueue()
    for number in range(workers):
        numbers.put(number)
    pool = ProcessPoolExecutor(min(workers, len(todo)), context, _begin_worker, (numbers, str(device)))
    try:
        for future in as_completed([pool.submit(_measured_by_worker, study, run) for run in todo]):
            yield future.result()
    finally:
        # Whatever ended this, do not start the remaining runs.
        pool.shutdown(wait=True, cancel_futures=True)


def _context(study: Study[Any, Any]) -> Any:
    """On Linux a server that has imported everything forks for each worker; it never computes, so no thread or GPU gets lost."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Optimizers of torch import `torch._dynamo` when they are made, which takes as long as the import of torch.
    context.set_forkserver_preload([type(study).__module__, __name__, "torch._dynamo"])
    return context


_device = torch.device("cpu")


def _begin_worker(numbers: Any, device: str) -> None:
    """Assign a device to a worker, and let it exit when its parent process does."""
    global _device
    number = numbers.get()
    _device = torch.device(f"cuda:{number % torch.cuda.device_count()}" if device == "cuda" else device)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)
    # Ctrl-C reaches the workers too, but the report of the parent process is enough. In the background of a shell script all of them
    # ignore it.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(128 + signum))
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _measured_by_worker(study: Study[Any, Any], run: Any) -> Result[Any]:
    return measured(study, run, _device)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Bar:
    """The number of runs done, and the time that the others will take, estimated from their work."""

    def __init__(self, bar: Any, runs: int) -> None:
        self._bar, self._runs, self._done = bar, runs, 0
        self._describe()

    def done(self, work: float) -> None:
        """Count one more run."""
        self._done += 1
        self._describe()
        self._bar.update(work)

    def _describe(self) -> None:
        self._bar.set_description_str(f"{self._done}/{self._runs} runs", refresh=False)


@contextmanager
def _bar(work: float, runs: int) -> Iterator[_Bar]:
    # Shown only on terminals.
    with tqdm(total=work, disable=None, bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left") as bar:
        yield _Bar(bar, runs)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"one core of {name}"
