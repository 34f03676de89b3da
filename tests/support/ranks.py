"""A pool of processes for distributed tests. They outlive a test, because starting them takes longer than most tests."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed, multiprocessing

#: Seconds without any computation after which ranks that have not answered count as stuck. On a busy machine ranks compute slowly, but
#: only ranks that wait for something that never happens use no processor time.
IDLE = 120.0
#: Seconds that a call may take, however busy its ranks are.
CAP = 900.0
#: Seconds that the others may still take once one rank has failed.
GRACE = 3.0
#: Modules that take seconds to import and compute nothing at import.
IMPORTED = [
    "qsim",
    "torch._inductor.lowering",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
]
# Inductor asks for CUDA at import: in the way that does not start it, since a process that has started CUDA cannot fork one that uses it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
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
    """A number of processes, each with its rank, that work together.

    A call in which a rank fails, dies or never answers raises an error that names the rank and the reason, and ends all processes; the next
    call starts new ones.

    Args:
        size: Number of processes.
        kind: `"cpu"`, where they communicate through gloo, or `"cuda"`, where each has a GPU and they communicate through NCCL.
        folder: An empty folder for their rendezvous and their error output.
        idle: Seconds without any computation after which ranks count as stuck.
        cap: Seconds that a call may take.
    """

    def __init__(self, size: int, kind: str, folder: Path, *, idle: float = IDLE, cap: float = CAP) -> None:
        self._parts = (size, kind, folder)
        self._starts = 0
        self.idle, self.cap = idle, cap
        self.members: list[Member] = []

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Make every process call a function of this repository's tests with a device and the arguments; return the results by rank."""
        message = pickle.dumps((work, arguments))
        self._start()
        try:
            answers = self._answers(message)
            if any(answer.failure for answer in answers.values()):
                raise RuntimeError(self._report(answers))
        except BaseException:
            self._kill()
            raise
        return [torch.load(io.BytesIO(answers[rank].result), weights_only=False) for rank in range(len(answers))]

    def stop(self) -> None:
        """End the processes; the next call starts new ones."""
        for member in self.members:
            member.end.close()
        for member in self.members:
            member.process.join(5)
        self._kill()

    def _kill(self) -> None:
        for member in self.members:
            member.kill()
        self.members = []

    def _start(self) -> None:
        dead = [member.death() for member in self.members if not member.process.is_alive()]
        if dead:
            # An idle rank died: no test failed because of it, but the summary of warnings should show it.
            warnings.warn("between two calls " + "\n".join(dead), RuntimeWarning, stacklevel=3)
            self._kill()
        if self.members:
            return
        size, kind, folder = self._parts
        self._starts += 1
        meeting = f"file://{folder}/meeting-{self._starts}"
        self.members = [Member(rank, size, kind, meeting, folder / f"errors-{self._starts}-{rank}") for rank in range(size)]

    def _answers(self, message: bytes) -> dict[int, RankAnswer]:
        """Send the work to all ranks and collect their answers; the answer of an abandoned rank says where it was."""
        answers: dict[int, RankAnswer] = {}
        for member in self.members:
            if not member.send(message):
                answers[member.rank] = member.answer()
        patience = Patience(self.members, self.idle, self.cap)
        while pending := [member for member in self.members if member.rank not in answers]:
            ready = wait([handle for member in pending for handle in (member.end, member.process.sentinel)], timeout=0.2)
            for member in pending:
                if member.end in ready or member.process.sentinel in ready:
                    answers[member.rank] = member.answer()
            if any(answer.failure for answer in answers.values()):
                patience.shorten(GRACE)
            if not ready and (over := patience.over()):
                return answers | {member.rank: RankAnswer(f"rank {member.rank} {over}\n{member.stacks()}") for member in pending}
        return answers

    def _report(self, answers: dict[int, RankAnswer]) -> str:
        """The failures in the order in which they were noticed, but dead ranks first: other ranks fail because they lost them."""
        failures = sorted((answer for answer in answers.values() if answer.failure), key=lambda answer: not answer.died)
        return "\n".join(answer.failure for answer in failures)


@dataclass(frozen=True)
class RankAnswer:
    """The result of a rank's work, as bytes, or the reason why there is none."""

    failure: str = ""
    result: bytes = b""
    died: bool = False


class Member:
    """One process of a pool, and our end of the pipe to it."""

    def __init__(self, rank: int, size: int, kind: str, meeting: str, errors: Path) -> None:
        # A server that has imported these modules forks for every rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.rank, self._errors = rank, errors
        errors.touch()
        self.end, theirs = context.Pipe()
        self.process: Any = context.Process(target=_live, args=(rank, size, kind, meeting, errors, theirs), daemon=True)
        # The server starts with the first process, and finds modules where this one does.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            self.process.start()
        theirs.close()

    def send(self, message: bytes) -> bool:
        """Send a call; return whether the process could be reached."""
        try:
            self.end.send_bytes(message)
        except OSError:
            return False
        return True

    def answer(self) -> RankAnswer:
        """Receive an answer; only call this once there is one or the process is dead."""
        try:
            if self.end.poll():
                failure, result = self.end.recv()
                return RankAnswer(f"rank {self.rank} raised an error:\n{failure}" if failure else "", result)
        except (EOFError, OSError):
            pass
        return RankAnswer(self.death(), died=True)

    def death(self) -> str:
        """Describe how the process ended, with the last lines of its standard error."""
        self.process.join(5)
        code = self.process.exitcode
        how = (
            "closed its pipe" if code is None else f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )
        return f"rank {self.rank} {how}\n{self._written()}"

    def stacks(self) -> str:
        """The current stack of each thread of the process, which must be alive."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._written()

    def processor_time(self) -> float:
        """Processor time of the process and its finished children in seconds; on systems without /proc, the elapsed time."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        self.end.close()
        self.process.kill()
        self.process.join()

    def _written(self) -> str:
        return "\n".join(self._errors.read_text(errors="replace").splitlines()[-40:])


class Patience:
    """Decide when to stop waiting for processes: when they compute nothing, or after a time that is too long for any test."""

    #: The share of a processor that a rank uses at least if it computes, even if a hundred processes compete for it. One that waits for the
    #: others uses 0.3 %, because gloo polls.
    _SHARE = 0.01

    def __init__(self, members: list[Member], idle: float, cap: float) -> None:
        self._members, self._idle, self._cap = members, idle, cap
        self._begin = self._moved = time.monotonic()
        self._end = self._begin + cap
        self._computed = self._times()
        self._enough = max(0.1, self._SHARE * idle)

    def shorten(self, seconds: float) -> None:
        """Set the end to this many seconds from the first call of this method, if that is earlier."""
        self._end = min(self._end, time.monotonic() + seconds)

    def over(self) -> str:
        """The reason to stop waiting, or an empty text."""
        now, computed = time.monotonic(), self._times()
        if any(after - before > self._enough for before, after in zip(self._computed, computed, strict=True)):
            self._computed, self._moved = computed, now
        if now >= self._begin + self._cap:
            return f"was still computing after {self._cap:g} s:"
        if now >= self._end:
            return "was waiting when another rank failed:"
        return f"did not answer, and no rank has computed anything for {self._idle:g} s:" if now >= self._moved + self._idle else ""

    def _times(self) -> list[float]:
        return [member.processor_time() for member in self._members]


def _live(rank: int, size: int, kind: str, meeting: str, errors: Path, end: Connection) -> None:
    _write_errors_to(errors)
    torch.set_num_threads(1)
    # Uninitialised memory holds NaN, as in all tests.
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    # The pool determines how long ranks may wait for each other.
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=2 * CAP))
    while True:
        try:
            message = end.recv_bytes()
        except EOFError:
            distributed.destroy_process_group()
            return
        # Unless a test says otherwise, all have different seeds.
        torch.manual_seed(rank + 1)
        result = io.BytesIO()
        try:
            work, arguments = pickle.loads(message)
            torch.save(_on_cpu(work(device, *arguments)), result)
            end.send(("", result.getvalue()))
        except Exception:
            end.send((traceback.format_exc(), b""))


def _write_errors_to(file: Path) -> None:
    """Redirect standard error to a file, including the stacks that are dumped in a crash and upon SIGUSR1."""
    sys.stderr.flush()
    with file.open("ab") as written:
        os.dup2(written.fileno(), 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().clone()
    if isinstance(x, dict):
        return {key: _on_cpu(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_on_cpu(value) for value in x]
    return x
