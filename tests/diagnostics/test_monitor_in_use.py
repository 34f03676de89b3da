"""The monitor while a model trains: training is unaffected, and nothing is counted twice."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import Monitor, cancelled_updates
from qsim.nn.product import observers
from support.points import in_order
from support.watched import NOISY, POINTS, net


@pytest.mark.sampled(4)
@pytest.mark.parametrize("points", ["plain", "scaled", "delayed", "nvfp4"])
def test_training_gives_the_same_bits(points: str) -> None:
    recipes: dict[str, Any] = {
        "plain": POINTS,
        "scaled": qsim.recipes.mxfp8().points,
        "delayed": in_order(*[Quantizer("e4m3", scale=qsim.scaling.Delayed(history=4))] * 2, grad=Quantizer("e5m2", "stochastic")),
        "nvfp4": qsim.recipes.nvfp4().points,
    }
    ends = []
    for every in (None, 1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.Dropout(0.2), qsim.nn.Quantize("e4m3", NOISY), nn.Linear(32, 50))
        qsim.convert(model, recipes[points], embeddings=points in ("plain", "delayed"))
        optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, update="stochastic", format="bf16")
        monitor = Monitor(model, every=every, optimizer=optimizer) if every else None
        losses = []
        for _ in range(5):
            tokens = torch.randint(50, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            assert [sample.step for sample in monitor.samples] == list(range(0, 5, every))
            assert all(len(sample) >= 6 for sample in monitor.samples)
            monitor.close()
        ends.append((losses, [value.clone() for value in model.state_dict().values()], torch.get_rng_state()))
    for losses, state, generator in ends[1:]:
        assert losses == ends[0][0]
        assert all(torch.equal(one, other) for one, other in zip(state, ends[0][1], strict=True))
        assert torch.equal(generator, ends[0][2])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_units_that_round_every_operator_do_not_see_the_monitor(rounding: str) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        scaled = Quantizer("e4m3", scale=qsim.scaling.PerTensor())
        model = net(FivePoint(act="mxfp8", weight="mxfp8", grad="mxfp8", act_bwd=None, weight_bwd=None)).append(
            qsim.nn.Quantize(scaled, NOISY)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with qsim.fpu("bf16", rounding):
            monitor = Monitor(model, every=1) if watched else None
            cancelled = cancelled_updates(optimizer) if watched else None
            for _ in range(2):
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step()
        ends.append([*(parameter.detach().clone() for parameter in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert monitor is not None
    assert cancelled is not None
    monitor.close()
    assert len(monitor.samples[1]) == 8
    assert len(cancelled.updates) == 8


class Twice(nn.Module):
    """One layer that is called twice, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.first(self.first(x)))  # type: ignore[no-any-return]


def test_layers_called_twice_tied_weights_and_micro_batches() -> None:
    model = qsim.convert(Twice(), POINTS)
    with Monitor(model) as monitor:
        for _ in range(3):
            model(torch.randn(5, 16)).sum().backward()
        monitor.step()
    sample = monitor.samples[0]
    for point in ("act", "act_bwd", "grad"):
        assert sample["first", point].elements == 3 * 2 * 5 * 16
        assert sample["tied", point].elements == 3 * 5 * 16
    assert sample["first", "weight"].elements == 3 * 2 * 256
    assert sample["tied", "weight"].elements == 3 * 256


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("points", [POINTS, FivePoint(act="mxfp8", weight="mxfp8", act_bwd="mxfp8", weight_bwd="mxfp8", grad="mxfp8")])
def test_checkpointing_counts_once(points: FivePoint, reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = net(points)
        x = torch.randn(64, 32).requires_grad_()
        with Monitor(model) as monitor:
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            y.square().sum().backward()
            monitor.step()
        found.append(monitor.samples[0].to_dict())
    assert found[0] == found[1]
    assert len(found[0]["points"]) == 10


def test_only_sampled_steps_have_hooks() -> None:
    model = net()

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    monitor = Monitor(model, every=2)
    seen = []
    for _ in range(5):
        seen.append(hooks())
        model(torch.randn(2, 32)).sum().backward()
        monitor.step()
    assert seen == [4, 0, 4, 0, 4]
    assert [sample.step for sample in monitor.samples] == [0, 2, 4]
    monitor.close()
    assert hooks() == 0
    assert observers.current() is None
    model(torch.randn(2, 32))
    assert len(monitor.samples) == 3
    with pytest.raises(RuntimeError, match="Monitor: a closed monitor counts no steps"):
        monitor.step()


def test_a_layer_that_fails_leaves_no_observer_active() -> None:
    model = net()
    with Monitor(model) as monitor:
        with pytest.raises(ValueError, match="does not fit"):
            model(torch.randn(2, 31))
        assert observers.current() is None
        model(torch.randn(2, 32))
        monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 64


def test_a_backward_pass_after_its_step_is_not_counted() -> None:
    model = net()
    with Monitor(model, every=2) as monitor:
        y = model(torch.randn(2, 32))
        monitor.step()
        y.sum().backward()
        monitor.step()
    assert {counts.point for counts in monitor.samples[0]} == {"act", "weight"}


def test_copies_of_a_watched_model_are_not_watched() -> None:
    model = net()
    with Monitor(model) as monitor:
        copy.deepcopy(model)(torch.randn(2, 32))
        pickle.loads(pickle.dumps(model))(torch.randn(2, 32))
        with pytest.warns(RuntimeWarning, match="no layer rounded anything in step 0; compiled code"):
            monitor.step()
    assert monitor.samples[0].records == ()


def test_compiled_code_is_refused_or_left_alone() -> None:
    with pytest.raises(ValueError, match="Monitor: the model is compiled, and compiled code is not watched"):
        Monitor(torch.compile(net()))  # type: ignore[arg-type]
    model = net()
    model[2].compile(backend="eager")
    with pytest.raises(ValueError, match="Monitor: its module '2' is compiled"):
        Monitor(model)


def test_compiled_graphs_do_not_know_of_monitors() -> None:
    count = CompileCounter()
    other, watched = net(), net()
    torch._dynamo.reset()
    compiled = torch.compile(other, backend=count, fullgraph=True)
    x = torch.randn(4, 32)
    compiled(x)
    graphs = count.frame_count
    with Monitor(watched) as monitor:
        watched(x)
        compiled(x).sum().backward()
        monitor.step()
    compiled(x)
    assert count.frame_count == graphs == 1


@pytest.mark.slow
def test_a_watched_model_inside_of_compiled_code_is_not_seen() -> None:
    count = CompileCounter()
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(lambda x: model(x), backend=count, fullgraph=True)
    x = torch.randn(4, 32)
    compiled(x)
    with Monitor(model, every=2) as monitor:
        for step in range(4):
            compiled(x)
            if step % 2:
                monitor.step()
                continue
            with pytest.warns(RuntimeWarning, match=f"no layer rounded anything in step {step}"):
                monitor.step()
    assert count.frame_count == 1
    assert monitor.samples[0].records == ()


def test_models_that_cannot_be_watched() -> None:
    with pytest.raises(TypeError, match=r"Monitor: model must be a torch.nn.Module, got 3"):
        Monitor(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Monitor: the model has no layer with points"):
        Monitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Monitor: every must be in 1…"):
        Monitor(net(), every=0)
    with pytest.raises(TypeError, match=r"Monitor: optimizer must be a torch.optim.Optimizer, got 3"):
        Monitor(net(), optimizer=3)  # type: ignore[arg-type]
    model = net()
    with Monitor(model), pytest.raises(ValueError, match="Monitor: another monitor watches the model: close that one first"):
        Monitor(model)
    Monitor(model).close()


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for() -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(64, 32, device="cuda")
    monitor = Monitor(model, every=1, optimizer=optimizer)
    for number in range(6):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [sample.step for sample in monitor.samples] == list(range(6))
    monitor.close()


@pytest.mark.gpu
def test_capture_of_a_sampled_step_counts_nothing() -> None:
    model = net().cuda()
    x = torch.randn(64, 32, device="cuda")
    with Monitor(model) as monitor:
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        graph.replay()
        monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 64 * 32


@pytest.mark.parametrize("reentrant", [False, True])
def test_evaluation_between_two_steps_is_not_counted(reentrant: bool) -> None:
    found = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model = net(FivePoint(act="e4m3", weight="e4m3", act_bwd="e5m2", grad="e5m2", weight_bwd=None))
        x = torch.randn(8, 32).requires_grad_()
        with Monitor(model, every=1) as monitor:
            for _ in range(2):
                checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
                monitor.step()
                if evaluated:
                    model.eval()
                    model(torch.randn(400, 32))
                    with torch.no_grad():
                        model(torch.randn(400, 32))
                    model.train()
                    with torch.inference_mode():
                        model(torch.randn(400, 32))
        found.append([sample.to_dict() for sample in monitor.samples])
    assert found[0] == found[1]
    assert found[0][1]["points"][0]["elements"] == 8 * 32


def test_a_part_in_eval_mode_is_counted_while_the_rest_trains() -> None:
    model = net()
    model[0].eval()
    with Monitor(model, every=1) as monitor:
        model(torch.randn(2, 32)).sum().backward()
        monitor.step()
        with torch.no_grad():
            model(torch.randn(2, 32))
        with pytest.warns(RuntimeWarning, match="no layer rounded anything in step 1; compiled code, .* and evaluation are not watched"):
            monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 64
