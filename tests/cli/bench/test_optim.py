"""Tests of `qsim bench optim`: the measured steps, tensors and peers, and errors for bad arguments. Speed is not tested."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

import qsim
from qsim.cli import main
from qsim.cli.bench import _counting, optim
from qsim.cli.bench._options import BenchSettings
from qsim.cli.bench._timing import Call, Clock
from qsim.cli.bench.optim import GPTS, WORK, ParameterSet, gpt, one

TINY = ("--device", "cpu", "--elements", "2^6", "--repeats", "2")
CPU = BenchSettings(device=torch.device("cpu"), elements=64, repeats=2)

#: Update, states and bytes per weight: all are read and written, except the gradient, which is only read.
ADAMW = [
    ("stochastic", "bf16", 14),
    ("stochastic", "fp32", 22),
    ("kahan", "bf16", 18),
    ("kahan", "fp32", 26),
    ("nearest", "bf16", 14),
    ("nearest", "fp32", 22),
]
EVERYTHING = [
    *(("AdamW", *rest) for rest in ADAMW),
    ("AdamW, stochastic moments", "stochastic", "bf16", 14),
    ("AdamW, E4M3 weights", "stochastic", "bf16", 14),
    ("SGD, momentum", "stochastic", "bf16", 10),
    ("fp32→bf16 copy", "stochastic", "-", 6),
]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "optim", *TINY, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def _smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose steps are fast."""
    monkeypatch.setitem(GPTS, "tiny", ("a tiny GPT", 1, 16))


# what is measured


def test_steps_measure_every_work_on_both_sets_of_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys)
    assert found["heading"].endswith("; 2^6 elements")
    rows = found["rows"]
    assert len(rows) == 20
    # A block of width n has 12 n² + 13 n parameters.
    for own, label, count, elements in ((rows[:10], "1 of 2^6", 1, 64), (rows[10:], "12 of a tiny GPT", 12, 12 * 16**2 + 13 * 16)):
        assert [(row["tensors"], row["count"], row["elements"]) for row in own] == [(label, count, elements)] * 10
        assert [(row["algorithm"], row["update"], row["states"], row["bytes"] / elements) for row in own] == EVERYTHING
    for row in rows:
        assert row["part"] == "steps"
        assert row["milliseconds"] == pytest.approx(row["seconds"] * 1e3)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
        assert row["ratio"] > 0
        # The CPU has no launches, and the host does the work.
        assert row["launches"] is None
        assert row["host_microseconds"] is None


def test_the_gpt_is_gpt_2_medium_without_its_embeddings() -> None:
    found = gpt("medium")
    assert found.label == "288 of GPT-2 medium"
    assert found.elements == 302309376
    norm = [(1024,), (1024,)]
    attention = [*norm, (3072, 1024), (3072,), (1024, 1024), (1024,)]
    mlp = [*norm, (4096, 1024), (4096,), (1024, 4096), (1024,)]
    assert found.shapes == [*attention, *mlp] * 24


@pytest.mark.parametrize(
    ("name", "number", "kind", "options", "states"),
    [
        *(("adamw", number, "AdamW", {"update": update, "format": None}, states) for number, (update, states, _) in enumerate(ADAMW)),
        ("adamw-moments", 0, "AdamW", {"update": "stochastic", "format": None, "state_rounding": "stochastic"}, "bf16"),
        ("adamw-e4m3", 0, "AdamW", {"update": "stochastic", "format": "e4m3"}, "bf16"),
        ("sgd", 0, "SGD", {"update": "stochastic", "format": None, "momentum": 0.9}, "bf16"),
    ],
)
def test_optimizers_are_what_their_rows_say(name: str, number: int, kind: str, options: dict[str, Any], states: str) -> None:
    step, _ = WORK[name][number].prepare(gpt("tiny"), CPU)
    optimizer = step.__self__  # type: ignore[attr-defined]
    assert type(optimizer) is getattr(qsim.optim, kind)
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in options} == options
    before = [p.detach().clone() for p in group["params"]]
    for _ in range(3):
        step()
    assert all(int(optimizer.state[p]["step"]) == 4 for p in group["params"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[states]
    moments = ("momentum_buffer",) if kind == "SGD" else ("exp_avg", "exp_avg_sq")
    assert all(optimizer.state[p][moment].dtype == dtype for p in group["params"] for moment in moments)
    assert any(not torch.equal(old, p) for old, p in zip(before, group["params"], strict=True))
    if options["format"] is not None:
        assert all(torch.equal(p, qsim.quantize(p.detach(), "e4m3")) for p in group["params"])


def test_the_copy_goes_over_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        seen.append((tuple(target.shape), target.dtype, tuple(source.shape), source.dtype))

    call, _ = WORK["copy"][0].prepare(gpt("tiny"), CPU)
    monkeypatch.setattr(qsim.optim, "copy_fp32_to_bf16_stochastic_", copy)
    call()
    assert seen == [(shape, torch.bfloat16, shape, torch.float32) for shape in gpt("tiny").shapes]


def test_options_choose_the_tensors_and_the_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "--tensors", "one", "--algorithms", "copy,sgd", "--elements", "100")["rows"]
    assert [(row["tensors"], row["algorithm"]) for row in rows] == [("1 of 100", "fp32→bf16 copy"), ("1 of 100", "SGD, momentum")]
    rows = bench(capsys, "--tensors", "gpt", "--algorithms", "sgd", "--size", "tiny")["rows"]
    assert [row["tensors"] for row in rows] == ["12 of a tiny GPT"]


# launches and the host's time


def test_on_a_gpu_launches_are_counted_after_everything_has_been_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    works = []
    for number, name in enumerate(("a", "b"), start=1):

        def call(number: int = number) -> int:
            return number

        def prepare(tensors: ParameterSet, settings: BenchSettings, call: Call = call, number: int = number) -> tuple[Call, int]:
            return call, 100 * number

        works.append(optim.OptimizerWork(name, "stochastic", "bf16", prepare))

    def beside_copy(call: Call, moved: int, settings: BenchSettings) -> dict[str, float]:
        events.append("timed")
        return {"bytes": moved, "seconds": 0.5}

    def host_time(calls: list[Call], clock: Clock, repeats: int, batch: int) -> list[float]:
        return [call() * 1e-3 for call in calls]  # type: ignore[operator]

    def launches(call: Call) -> object:
        events.append("counted")
        return call()

    monkeypatch.setattr(optim, "beside_copy", beside_copy)
    monkeypatch.setattr(optim, "host_time", host_time)
    monkeypatch.setattr(optim, "launches", launches)
    rows = list(optim.steps(BenchSettings(device=torch.device("cuda"), repeats=2), [one(8), one(16)], works))
    found = [(row["algorithm"], row["elements"], row["bytes"], row["launches"], row["host_microseconds"]) for row in rows]
    numbers = {"a": 1, "b": 2}
    assert found == [(name, size, 100 * n, n, pytest.approx(1000 * n)) for size in (8, 16) for name, n in numbers.items()]
    assert events == ["timed"] * 4 + ["counted"] * 4


def test_work_of_the_device_counts_and_what_only_describes_it_does_not() -> None:
    def event(device: DeviceType, annotation: bool = False) -> Any:
        return types.SimpleNamespace(device_type=device, is_user_annotation=annotation)

    kernel, copy, call = event(DeviceType.CUDA), event(DeviceType.CUDA), event(DeviceType.CPU)
    spans = [event(DeviceType.CUDA, True), event(DeviceType.CPU, True)]
    assert _counting._work_on_device([call, kernel, *spans, call, copy]) == 2
    assert _counting._work_on_device([call, *spans]) == 0


# on a GPU


@pytest.mark.gpu
def test_kernels_copies_and_fills_are_counted_and_annotations_are_not() -> None:
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")

    def three() -> None:
        with torch.profiler.record_function("a span over all of them"):
            x.add_(1)
            y.copy_(x)
            x.mul_(y)

    assert _counting.launches(lambda: x.add_(1)) == 1
    assert _counting.launches(three) == 3
    assert _counting.launches(lambda: None) is None


@pytest.mark.gpu
def test_every_part_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cuda", "--elements", "2^16", "--size", "tiny", "--repeats", "3", "--json"]
    assert main(["bench", "optim", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 20
    assert all(row["ratio"] > 0 for row in rows)
    for row in rows:
        assert row["host_microseconds"] > 0
        # One group takes at most three launches, however many tensors it has; a copy takes one tensor.
        assert 1 <= row["launches"] <= (row["count"] if row["states"] == "-" else 3)
