"""The pool of rank processes: a rank that dies, fails or hangs fails one call, with the reason, and the next call works."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from support.ranks import NEEDS_GLOO, Patience, Ranks

pytestmark = NEEDS_GLOO


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, "cpu", tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture
def two(shared: Ranks) -> Iterator[Ranks]:
    """Two running ranks, with limits that a test may change. After each test, the next call must work."""
    before = shared.idle, shared.cap
    check(shared)
    yield shared
    shared.idle, shared.cap = before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(shared)


def check(ranks: Ranks) -> None:
    assert ranks(_sum) == [3.0, 3.0]


def _sum(device: torch.device) -> float:
    x = torch.tensor(distributed.get_rank() + 1.0)
    distributed.all_reduce(x)
    return x.item()


def _on_rank_1(device: torch.device, act: str) -> float:
    """Fail in some way on rank 1, while rank 0 waits for it in a reduction."""
    if distributed.get_rank() == 1:
        ACTS[act]()
    return _sum(device)


def _fail() -> None:
    raise ValueError("bad input")


def _write_and_exit() -> None:
    print("no memory left", file=sys.stderr)
    os._exit(3)


def _hang() -> None:
    time.sleep(1000)


def _compute_for_ever() -> None:
    while True:
        pass


ACTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": _write_and_exit,
    "fail": _fail,
    "hang": _hang,
    "compute": _compute_for_ever,
}


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("kill", ["rank 1 was killed by SIGKILL"]),
        ("crash", ["rank 1 was killed by SIGSEGV", "Fatal Python error: Segmentation fault", "in _on_rank_1"]),
        ("exit", ["rank 1 exited with code 3", "no memory left"]),
        ("fail", ["rank 1 raised an error:", "ValueError: bad input"]),
    ],
)
def test_a_rank_that_dies_or_fails_is_named_with_its_reason(two: Ranks, act: str, words: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        two(_on_rank_1, act)
    # The rank at fault comes first, although rank 0, which lost its partner, may have failed as well.
    assert str(error.value).startswith(words[0])
    for part in words:
        assert part in str(error.value)
    assert not two.members, "and all processes are gone"


def test_ranks_that_hang_are_given_up_when_nothing_computes(two: Ranks) -> None:
    two.idle = 1.0
    with pytest.raises(RuntimeError, match="rank 1 did not answer, and no rank has computed anything for 1 s") as error:
        two(_on_rank_1, "hang")
    assert "in _hang" in str(error.value), "with the stack of the rank that hangs"
    assert "in all_reduce" in str(error.value), "and of the one that waits for it"


def test_ranks_that_compute_are_waited_for_up_to_the_cap(two: Ranks) -> None:
    # On a busy machine a rank that computes may not get a core for half a second.
    two.idle, two.cap = 2.0, 5.0
    with pytest.raises(RuntimeError, match="rank 1 was still computing after 5 s") as error:
        two(_on_rank_1, "compute")
    assert "in _compute_for_ever" in str(error.value)


def _unpicklable(device: torch.device) -> Any:
    return lambda: None


def test_results_that_cannot_be_sent_are_an_error(two: Ranks) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 raised an error:\n(.*\n)*.*[Pp]ickle"):
        two(_unpicklable)


def test_work_that_cannot_be_sent_is_an_error_and_ends_no_process(two: Ranks) -> None:
    before = two.members
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        two(_on_rank_1, lambda: None)
    assert two.members is before


@pytest.mark.parametrize("seen", [True, False])
def test_a_rank_that_dies_between_two_calls(two: Ranks, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that notices in time starts new processes and warns; one that sends to the dead process fails."""
    victim = two.members[1]
    victim.process.kill()
    victim.process.join()
    if seen:
        with pytest.warns(RuntimeWarning, match="between two calls rank 1 was killed by SIGKILL"):
            check(two)
        return
    with monkeypatch.context() as patched:
        patched.setattr(victim.process, "is_alive", lambda: True)
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            check(two)


def test_an_interrupted_call_leaves_no_stale_answers(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Patience) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Patience, "over", interrupt)
        with pytest.raises(KeyboardInterrupt):
            two(_slow)
    assert not two.members


def _slow(device: torch.device) -> str:
    time.sleep(1)
    return "an answer to another call"


def test_ranks_that_are_stopped_start_again(tmp_path: Path) -> None:
    ranks = Ranks(2, "cpu", tmp_path)
    check(ranks)
    ranks.stop()
    check(ranks)
    ranks.stop()
