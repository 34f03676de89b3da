"""Studies on a Dask cluster: two worker processes, one of them killed, give what one process gives; errors come before the first run."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from qsim import studies
from qsim.cli import main
from qsim.studies import cluster, processes
from qsim.studies.cluster import Offer, checked_offers
from qsim.studies.measuring import versions
from support.coins import Coins
from support.marked_coins import MarkedCoins, marks

distributed = pytest.importorskip("distributed", reason="needs dask[distributed]")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a scheduler with two workers, which are started again when they die."""
    import dask

    method = {"distributed.worker.multiprocessing-method": "spawn"}
    if sys.platform == "linux":
        # Workers are forks of a server that has imported everything.
        processes._context(Coins()).set_forkserver_preload(["support.marked_coins", "support.coins", "qsim.studies.cluster", "distributed"])
        multiprocessing.forkserver.ensure_running()
        method = {"distributed.worker.multiprocessing-method": "forkserver"}
    with (
        dask.config.set(method),
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None, silence_logs=50) as local,
    ):
        yield local.scheduler_address


def lines(folder: Path) -> list[str]:
    """The stored results, without what depends on when they were computed."""
    read = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return sorted(json.dumps({name: value for name, value in line.items() if name not in ("seconds", "machine")}) for line in read)


@pytest.mark.usefixtures("blank_figures")
def test_a_cluster_gives_what_one_process_gives(scheduler: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    studies.run(Coins(), out=here)
    plan = studies.plan(Coins(), out=there, scheduler=scheduler)
    found = plan.estimate()
    assert (len(found.seconds), found.at_once) == (6, 2)
    assert not there.exists()
    assert studies.run(Coins(), out=there, scheduler=scheduler).meaning == "Fair."
    assert lines(here) == lines(there)
    page, other = ((folder / "report.md").read_text().splitlines() for folder in (here, there))
    assert [line for line in page if "seconds in total" not in line] == [line for line in other if "seconds in total" not in line]
    assert (here / "tosses.svg").read_bytes() == (there / "tosses.svg").read_bytes()
    # Nothing is left to do, and results of the workers' machine give the estimates.
    assert not studies.plan(Coins(), out=there, scheduler=scheduler).todo()


def test_a_killed_worker_loses_and_repeats_nothing(scheduler: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "marks", tmp_path / "out"
    folder.mkdir()
    settings = {"folder": str(folder), "seeds": 8, "waits": 2}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(studies.run, MarkedCoins(), out=out, scheduler=scheduler, settings=settings)
        deadline = time.monotonic() + 120
        while not running.done() and not (marks(folder, 2) and _stored(out) >= 3):
            assert time.monotonic() < deadline, "no run waits"
            time.sleep(0.02)
        os.kill(marks(folder, 2)[0], signal.SIGKILL)
        assert running.result().meaning == "0 1 2 3 4 5 6 7"
    assert len(lines(out)) == 8
    assert [len(marks(folder, seed)) for seed in range(8)] == [1, 1, 2, 1, 1, 1, 1, 1]


def _stored(folder: Path) -> int:
    file = folder / "results.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_an_error_in_a_run_is_raised(scheduler: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no coin is that light"):
        studies.run(Coins(), out=tmp_path, scheduler=scheduler, settings={"weight": -1.0})


def test_workers_that_differ_raise_an_error_first(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no worker of tcp://.* offers a GPU; start each with --nthreads 1 --resources GPU=1"):
        studies.run(Coins(), out=tmp_path / "out", scheduler=scheduler, device="cuda")
    (tmp_path / "only_here.py").write_text("from support.coins import Coins\nclass Mine(Coins):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    with pytest.raises(ValueError, match=r"the worker tcp://.* cannot import what this process does: No module named 'only_here'"):
        studies.run(only_here.Mine(), out=tmp_path / "out", scheduler=scheduler)
    monkeypatch.setattr(cluster, "versions", lambda: {**versions(), "torch": "1.0"})
    with pytest.raises(ValueError, match=r"the worker tcp://.* has torch \d.*, but this process has 1.0; results may differ"):
        studies.run(Coins(), out=tmp_path / "out", scheduler=scheduler)
    assert not (tmp_path / "out").exists()
    # Workers that join later are checked as well.
    monkeypatch.setattr(cluster, "checked_offers", lambda *given: {})
    with pytest.raises(ValueError, match=r"the worker tcp://.* has torch \d.*, but this process has 1.0; results may differ"):
        studies.run(Coins(), out=tmp_path / "out", scheduler=scheduler)
    with pytest.raises(ValueError, match="has no workers, so how long runs take cannot be measured"):
        studies.plan(Coins(), out=tmp_path / "out", scheduler=scheduler).estimate()


def test_a_scheduler_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_TIMEOUT", 0.2)
    for address in ("tcp://127.0.0.1:1", "carrier-pigeon://roof"):
        with pytest.raises(ValueError, match=f"scheduler: no Dask scheduler answers at '{address}'"):
            studies.run(Coins(), out=tmp_path / "out", scheduler=address)
    assert not (tmp_path / "out").exists()


OFFER = Offer(1, "one core", "", versions())


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        ({"tcp://a:1": Offer(4, "one core", "", versions())}, "tcp://a:1 would execute 4 runs at once, .* start it with --nthreads 1"),
        ({"tcp://a:1": Offer(1, "", "", versions())}, "tcp://a:1 has --resources GPU=1, but its torch finds no GPU"),
        (
            {f"tcp://a:{port}": Offer(1, "H200", "GPU-7", versions()) for port in (1, 2)},
            "2 workers share the GPU GPU-7; .* CUDA_VISIBLE_DEVICES",
        ),
        ({"tcp://a:1": Offer(1, "one core", "", {**versions(), "Python": "2.7"})}, r"tcp://a:1 has Python 2.7, but this process has 3\."),
    ],
)
def test_offers(offers: dict[str, Offer | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_offers(offers, CUDA, "tcp://s:1")


def test_only_workers_with_a_gpu_are_asked_for_one() -> None:
    assert list(checked_offers({"tcp://a:1": None, "tcp://b:1": OFFER}, CUDA, "tcp://s:1")) == ["tcp://b:1"]
    taken: list[dict[str, Any]] = []

    class Client:
        def get_executor(self, **options: Any) -> None:
            taken.append(options)

    for device in (CPU, CUDA):
        cluster._submitting(Client(), Coins(), device)
    assert [options["resources"] for options in taken] == [None, {"GPU": 1}]


def test_dask_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "distributed" else find(name))
    assert main(["study", "formats", "--quick", "--scheduler", "tcp://s:1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "qsim: scheduler: needs dask: pip install 'qsim-torch[cluster]'\n"
