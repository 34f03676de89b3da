"""A study killed at random moments and resumed: no finished run is lost or repeated, and the table is the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qsim.cli import main

pytestmark = pytest.mark.slow

KILLS = 2
PATIENCE = 600.0  # seconds, on a machine that does much else
# A study whose processes import little.
WORDS = ["study", "stagnation", "--quick", "--length", "10", "--sample-steps", "200"]


def start(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "qsim", *WORDS, "--out", str(folder), "--workers", str(workers)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)


def finished(folder: Path) -> list[str]:
    """The keys of the runs that have results; every line is complete."""
    file = folder / "results.jsonl"
    return [json.dumps(json.loads(line)["run"], sort_keys=True) for line in file.read_text().splitlines()] if file.exists() else []


def others_of(session: int) -> list[int]:
    """The remaining processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends a signal to a group of processes")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["at a terminal", "in the background"])
def test_ctrl_c_ends_a_study_and_its_workers_with_one_line(handler: Any, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "qsim", *WORDS, "--out", str(tmp_path), "--workers", "2"]
    # A shell makes programs that it starts in the background ignore Ctrl-C, and they pass that on.
    before = signal.signal(signal.SIGINT, handler)
    try:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_results(tmp_path, 1)
    # As in a terminal: to all processes at once.
    os.killpg(process.pid, signal.SIGINT)
    if handler == signal.SIG_IGN:
        wait_for_results(tmp_path, len(finished(tmp_path)) + 2)
        os.killpg(process.pid, signal.SIGKILL)
    _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, error) == ((-signal.SIGKILL, "") if handler == signal.SIG_IGN else (130, "qsim: interrupted\n"))


def wait_for_results(folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(finished(folder)) < count:
        assert time.monotonic() < deadline, f"{count} results did not come"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes under /proc")
def test_killed_again_and_again(tmp_path: Path) -> None:
    disturbed, alone = tmp_path / "disturbed", tmp_path / "alone"
    draw = random.Random(20261121)
    done: list[str] = []
    for kill in range(KILLS):
        process = start(disturbed, 1 + kill % 2)
        try:
            deadline = time.monotonic() + PATIENCE
            while len(finished(disturbed)) == len(done) and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.05))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        now = finished(disturbed)
        assert now[: len(done)] == done, "results were lost"
        assert len(set(now)) == len(now) > len(done), "a run was done twice, or none at all"
        done = now
        deadline = time.monotonic() + PATIENCE
        while others_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not others_of(process.pid), "workers outlived the study"
    for folder in (disturbed, alone):
        # In this process: starting others takes longer than all runs.
        assert main([*WORDS, "--out", str(folder), "--workers", "1"]) == 0
    assert set(finished(disturbed)) == set(finished(alone))
    assert len(finished(alone)) == len(finished(disturbed)) > KILLS
    tables = [[line for line in (folder / "report.md").read_text().splitlines() if line.startswith("|")] for folder in (disturbed, alone)]
    assert tables[0] == tables[1]
    assert len(tables[0]) > 10
