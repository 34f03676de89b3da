"""Tests of `qsim bench host`: what is measured and counted, and errors for bad arguments. Speed itself is not tested."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import qsim
from qsim.cli import main
from qsim.cli.bench import host
from qsim.cli.bench._counting import calls_between_files
from qsim.random import streams

QUICK = ("--device", "cpu", "--repeats", "1")


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "host", *QUICK, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in host.BATCH:
        monkeypatch.setitem(host.BATCH, kind, 1)
    monkeypatch.setattr(host, "TURN", 0.001)


def test_layers_and_tensors_are_compared_with_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--points", "nearest,mxfp4")
    assert found["heading"].endswith(f"qsim {qsim.__version__}")
    assert [row["work"] for row in found["rows"]] == ["layer, nearest", "layer, mxfp4", *host.CALLS]
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["microseconds"] / row["their_microseconds"])
        assert (row["launches"], row["first_seconds"]) == (None, None)


def test_the_calls_of_a_user_do_what_they_are_called() -> None:
    x = torch.linspace(-7, 7, 101)
    results = {name: call() for name, call in host.prepared_calls(x).items()}
    assert torch.equal(results["quantize e4m3"], qsim.quantize(x, "e4m3"))
    assert set(results["quantize e4m3, stochastic"].tolist()) <= set(qsim.format("e4m3").values())
    assert torch.equal(results["encode e4m3"], qsim.encode(x, "e4m3"))
    assert torch.equal(results["encode e2m1"], qsim.encode(x, "e2m1"))
    assert torch.equal(results["encode e2m1, check=False"], qsim.encode(x, "e2m1"))
    assert torch.equal(results["decode e4m3"], qsim.quantize(x, "e4m3"))


def test_compiled_layers_tell_what_the_first_call_took(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.nn.Module] = []

    def compile_nothing(model: torch.nn.Module, mode: str) -> torch.nn.Module:
        seen.append(model)
        modes.append(mode)
        return model

    modes: list[str] = []
    monkeypatch.setattr(torch, "compile", compile_nothing)
    (row,) = bench(capsys, "--points", "nearest", "--compile", "reduce-overhead", "--layers", "3", "--only", "stack")["rows"]
    assert row["work"] == "3 layers, compiled, reduce-overhead, nearest"
    assert row["first_seconds"] > 0
    assert modes == ["reduce-overhead"] * 2
    assert [[type(layer) for layer in model[::2]] for model in seen] == [[torch.nn.Linear] * 3, [qsim.nn.Linear] * 3]  # type: ignore[index]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", *QUICK, "--points", "nearest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["work", "µs", "torch's", "µs", "ratio", "launches", "first", "call", "s"]
    assert lines[2].endswith("not counted")


def test_the_way_from_a_call_to_the_kernel_stays_short(capsys: pytest.CaptureFixture[str]) -> None:
    calls = {row["work"]: row["calls"] for row in bench(capsys, "--trace")["rows"]}
    assert calls["layer, five points"] <= 35
    assert calls["layer, mxfp4"] <= 46
    assert calls["layer, nvfp4"] <= 56
    assert calls["quantize e4m3"] <= 6
    assert all(count > 2 for count in calls.values())


def test_calls_within_a_file_and_outside_of_qsim_are_not_counted() -> None:
    assert calls_between_files(lambda: sorted([3, 1])) == 0
    # Into `random.py`, where functions call each other.
    assert calls_between_files(lambda: streams.rank_stream(3)) == 1
    small, large = (calls_between_files(lambda count=count: qsim.quantize(torch.ones(count), "e4m3")) for count in (3, 10**5))  # type: ignore[misc]
    assert small == large


def test_calls_of_other_threads_are_counted() -> None:
    def elsewhere(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        return run

    def work() -> Any:
        return qsim.quantize(torch.ones(3), "e4m3")

    assert calls_between_files(elsewhere(work)) == calls_between_files(work)
