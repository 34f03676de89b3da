"""Tests of `qsim bench linear` and `train`: what is measured, the baselines, and errors for bad arguments. Speed is not tested."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import qsim
from qsim import FivePoint
from qsim.cli import main
from qsim.cli.bench import _measured, _models, _recipes, linear, train
from qsim.cli.bench._models import ConvBenchSize, GPTBenchSize
from qsim.cli.bench._timing import Call, Clock

LINEAR = ("linear", "--device", "cpu", "--shapes", "8x4x2,6x8x8", "--seconds", "0.001")
TRAIN = ("train", "--device", "cpu", "--seconds", "0.001")
Seen = list[tuple[nn.Module, Any]]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def _smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose steps are all fast."""
    monkeypatch.setitem(_models.SIZES, "tiny", (GPTBenchSize(1, 2, 8, 16, 8, 2), ConvBenchSize(4, 1, 3, 8, 2)))


def run_once(calls: list[Call], clock: Clock, seconds: float) -> list[float]:
    """A stand-in for timing that calls everything once, and returns the given times."""
    for call in calls:
        call()
    return [3.0, 1.0][-len(calls) :]


@pytest.fixture
def three_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes a second, and the first of two takes three."""
    for module in (_measured, train):
        monkeypatch.setattr(module, "sustained", run_once)


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Seen:
    """Record the models whose steps are created, and their arguments."""
    seen: Seen = []
    make = getattr(module, name)

    def step(model: nn.Module, *rest: Any) -> Any:
        seen.append((model, rest))
        return make(model, *rest)

    monkeypatch.setattr(module, name, step)
    return seen


# one layer


def test_linear_compares_every_shape_with_torchs_layer(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, *LINEAR)
    assert f"qsim {qsim.__version__}; act=e4m3, weight=e4m3, act_bwd=e4m3 Stochastic()" in found["heading"]
    assert [(row["shape"], row["how"]) for row in found["rows"]] == [
        ("8 × 4 → 2", "eager"),
        ("6 × 8 → 8", "eager"),
    ]
    for row in found["rows"]:
        assert row["their_milliseconds"] > 0
        assert row["ratio"] == pytest.approx(row["milliseconds"] / row["their_milliseconds"])


@pytest.mark.usefixtures("three_to_one")
def test_ratios_are_qsims_time_to_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench(capsys, *LINEAR, "--shapes", "8x4x2")["rows"]
    assert (row["their_milliseconds"], row["milliseconds"], row["ratio"]) == (3000, 1000, pytest.approx(1 / 3))


def test_options_reach_the_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch, linear, "forward_and_backward")
    words = ("--shapes", "5x4x3", "--dtype", "bf16", "--no-bias", "--format", "e5m2", "--backward", "up")
    found = bench(capsys, *LINEAR, *words)
    up = qsim.Quantizer("e5m2", "up")
    assert [type(layer) for layer, _ in seen] == [nn.Linear, qsim.nn.Linear]
    assert all((x.shape, g.shape, x.dtype) == ((5, 4), (5, 3), torch.bfloat16) for _, (x, g) in seen)
    for layer, _ in seen:
        assert layer.bias is None
        assert layer.weight.dtype == torch.bfloat16
        assert layer.weight.shape == (3, 4)
    assert seen[1][0].points == FivePoint("e5m2", "e5m2", act_bwd=up, weight_bwd=up, grad=up)
    assert found["heading"].endswith("act=e5m2, weight=e5m2, act_bwd=e5m2 up, weight_bwd=e5m2 up, grad=e5m2 up")
    bench(capsys, *LINEAR, "--shapes", "5x4x3", "--backward", "same", "--accumulate", "h100_fp8")
    assert seen[3][0].points == FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate="h100_fp8")


# training


@pytest.mark.usefixtures("three_to_one")
def test_train_measures_every_model_without_points_and_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, *TRAIN)["rows"]
    variants = ("native", "five points")
    assert [(row["model"], row["variant"]) for row in rows] == [(model, variant) for model in ("gpt", "conv") for variant in variants]
    assert all(row["how"] == "eager" for row in rows)
    # 2 × 8 tokens and 2 images per step, which takes three seconds in the native model and one in the others.
    measured = [(row["milliseconds"], row["per_second"], row["ratio"]) for row in rows]
    expected = [(3000, 16 / 3, 1), (1000, 16, 1 / 3), (3000, 2 / 3, 1), (1000, 2, 1 / 3)]
    assert measured == [pytest.approx(each) for each in expected]
    # Torch does not count CPU memory.
    assert all(row.get("peak_mib") is None for row in rows)


@pytest.mark.usefixtures("three_to_one")
def test_all_layers_but_the_last_have_points(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch, train, "_step")
    bench(capsys, *TRAIN)
    # In order: two GPTs, two convolutional nets.
    counts = [len(qsim.nn.conversion(model).changed) for model, _ in seen]
    assert counts == [0, 4, 0, 9]
    assert [name for name, _, _ in qsim.nn.conversion(seen[1][0]).changed] == [
        f"blocks.0.{name}" for name in ("qkv", "merge", "up", "down")
    ]
    assert all(type(model.head) is nn.Linear for model, _ in seen)


def test_a_step_trains_and_leaves_no_gradient() -> None:
    model, batch, _ = _models.Subject("gpt", "tiny").make(torch.device("cpu"), torch.float32)
    step = train._step(model, batch, None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(*batch).item()
    for _ in range(5):
        step()
    assert model(*batch).item() < loss
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compiled_models_go_through_torch_compile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[nn.Module, str]] = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic, mode: compiled.append((model, mode)) or model)
    rows = bench(capsys, *TRAIN, "--models", "conv", "--compile", "--dtype", "bf16")["rows"]
    assert [(row["how"], row["variant"]) for row in rows] == [("compiled", "native"), ("compiled", "five points")]
    assert [(next(model.parameters()).dtype, mode) for model, mode in compiled] == [(torch.bfloat16, "default")] * 2


# on a GPU


@pytest.mark.gpu
def test_layers_are_replayed_and_peak_memory_is_counted_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "linear", "--device", "cuda", "--shapes", "64x32x32", "--seconds", "0.001")["rows"]
    assert [row["how"] for row in rows] == ["eager", "CUDA graph"]
    assert all(row["ratio"] > 0 for row in rows)
    rows = bench(capsys, "train", "--device", "cuda", "--size", "tiny", "--seconds", "0.001")["rows"]
    assert len(rows) == 4
    assert all(row["peak_mib"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["blocks", "regions"])
def test_blocks_are_compiled_once_for_all(way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_models.SIZES, "tiny", (GPTBenchSize(3, 2, 32, 16, 8, 2), ConvBenchSize(4, 1, 3, 8, 2)))
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, given)  # Inductor takes ten seconds

    monkeypatch.setattr(_recipes, "BACKEND", backend)
    found = bench(capsys, *TRAIN, "--compile", way, "--recipes", "mxfp4")
    assert "points" not in found["heading"]
    assert [row["recipe"] for row in found["rows"]] == ["native", "mxfp4"]
    assert [row["graphs"] for row in found["rows"]] == [1, 1]
    assert len(graphs) == 2
    assert all(row["first_seconds"] > row["milliseconds"] / 1e3 > 0 for row in found["rows"])
    assert found["rows"][0]["ratio"] == 1
    if way == "regions":
        calls = [[node.args[0].target for node in graph.graph.nodes if "invoke_subgraph" in str(node.target)] for graph in graphs]
        assert [(len(each), len(set(each))) for each in calls] == [(3, 1), (3, 1)]


def test_recipes_are_compared_in_models_compiled_as_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[nn.Module, str]] = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic=None, mode=None: compiled.append((model, mode)) or model)
    rows = bench(capsys, *TRAIN, "--compile", "reduce-overhead", "--recipes", "fp8_hybrid,mxfp8")["rows"]
    assert [row["recipe"] for row in rows] == ["native", "fp8_hybrid", "mxfp8"]
    assert [mode for _, mode in compiled[1:]] == ["reduce-overhead"] * 3
    assert [len(qsim.nn.conversion(model).changed) for model, _ in compiled[1:]] == [0, 4, 4]
