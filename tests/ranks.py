"""Processes of a distributed run that live through many tests: starting them takes longer than most of what they compute."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

TIMEOUT = 90
#: What takes seconds to import, and computes nothing when it is imported.
IMPORTED = ["qsim", "torch._inductor.config", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "pytest"]
NEEDS_GLOO = pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs torch.distributed")


def ranks_of(size: int) -> Any:
    """A fixture: the processes that a file's tests share, on CPUs and on as many GPUs."""

    def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
        if request.param == "cuda" and torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} CUDA devices")
        ranks = Ranks(size, request.param, tmp_path_factory.mktemp("ranks"))
        yield ranks
        ranks.stop()

    return pytest.fixture(start, scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Ranks:
    """A number of processes, each with its rank, that do the same work together.

    Args:
        size: How many.
        kind: `"cpu"`, where they talk through gloo, or `"cuda"`, where each has a GPU and they talk through NCCL.
        folder: Where they meet.
    """

    def __init__(self, size: int, kind: str, folder: Path) -> None:
        self._parts = (size, kind, folder)
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Has every process call a function of this repository's tests with a device and the arguments; gives what they return, by rank."""
        self._start()
        for end in self._ends:
            end.send((work, arguments))
        answers = [end.recv() if end.poll(TIMEOUT) else ("no answer", b"") for end in self._ends]
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(answers) if failure]
        if failures:
            self.stop()
            raise RuntimeError("\n".join(failures))
        return [torch.load(io.BytesIO(result), weights_only=False) for _, result in answers]

    def _start(self) -> None:
        if self._processes:
            return
        size, kind, folder = self._parts
        # A server that has imported it forks for every rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        meeting = f"file://{folder}/{len(list(folder.iterdir()))}"
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, size, kind, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def stop(self) -> None:
        """Ends the processes; the next call starts others."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._processes, self._ends = [], []


def _live(rank: int, size: int, kind: str, meeting: str, end: Connection) -> None:
    torch.set_num_threads(1)
    # Memory that nothing was written into holds NaN, as in all tests.
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT // 2))
    while True:
        try:
            work, arguments = end.recv()
        except EOFError:
            distributed.destroy_process_group()
            return
        # Unless a test says otherwise, no two are seeded alike.
        torch.manual_seed(rank + 1)
        result = io.BytesIO()
        try:
            torch.save(_on_cpu(work(device, *arguments)), result)
            end.send(("", result.getvalue()))
        except Exception:
            end.send((traceback.format_exc(), b""))


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().clone()
    if isinstance(x, dict):
        return {key: _on_cpu(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_on_cpu(value) for value in x]
    return x
