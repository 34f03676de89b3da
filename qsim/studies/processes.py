"""Several processes of this machine, on its cores or its GPUs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from qsim.studies.measuring import measured
from qsim.studies.result import Result
from qsim.studies.running import Workers
from qsim.studies.study import Study


@dataclass(frozen=True)
class Processes:
    """Measure several runs at a time, each in a process of its own.

    Attributes:
        device: The device to compute on. Without a GPU index, the processes are distributed over the GPUs.
        count: The number of processes.
    """

    device: torch.device
    count: int

    @contextmanager
    def ready(self, study: Study[Any, Any]) -> Iterator[Workers]:
        """Processes, each of which starts when there is a run for it."""
        context = _context(study)
        numbers = context.SimpleQueue()
        for number in range(self.count):
            numbers.put(number)
        pool = ProcessPoolExecutor(self.count, context, _begin_worker, (numbers, str(self.device)))
        try:
            here = Workers.here(study, self.device)
            yield replace(here, count=self.count, submit=lambda run, place: pool.submit(_measured_by_worker, study, run))
        finally:
            # Whatever ended this, do not start the remaining runs.
            pool.shutdown(wait=True, cancel_futures=True)


def default_count(device: torch.device) -> int:
    """One process for each core or GPU."""
    if device.type == "cuda":
        return torch.cuda.device_count() if str(device) == "cuda" else 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
