"""Schedules: phases of a run in a loop of one's own, saved and resumed, compiled, and the errors of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, Schedule
from support.comparing import same_bits

NOISY = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), Quantizer("e5m2", "stochastic"))
DELAYED = "fp8_hybrid('Delayed(history=4)')"
PHASES: dict[int | float, Any] = {0: "bf16", 0.25: "nvfp4", 0.5: NOISY, 0.75: DELAYED}
STEPS = 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Run:
    """A plain loop with a schedule of the model and one of its optimizer."""

    def __init__(self, model: nn.Module, phases: dict[int | float, Any], seed: int = 7) -> None:
        self.model = model
        self.optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, format="bf16", update="nearest", seed=1)
        torch.manual_seed(seed)
        self.points = Schedule(phases, total_steps=STEPS).start(model)
        self.updates = Schedule({0: {"update": "kahan"}, 3: {"update": "stochastic"}, 6: {"update": "kahan"}}).start(self.optimizer)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(self.points.steps))
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.points.step()
            self.updates.step()

    def state(self) -> dict[str, Any]:
        parts = {"schedule": self.points, "updates": self.updates, "model": self.model, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()} | {"random": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        self.points.load_state_dict(state["schedule"])
        self.updates.load_state_dict(state["updates"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])


def points_of(model: nn.Module) -> list[str]:
    return [str(layer.points) for layer in model.modules() if isinstance(layer, qsim.nn.Linear)]


def test_each_phase_begins_at_its_step() -> None:
    model = net()
    schedule = Schedule({0: "bf16", 2: "nvfp4", 4: None}).start(model)
    bf16, last = "act=bf16, weight=bf16, grad=bf16", "act=bf16"
    seen = []
    for _ in range(5):
        seen.append(points_of(model))
        schedule.step()
    nvfp4 = str(qsim.recipes.nvfp4().points)
    assert seen[0] == seen[1] == [bf16] * 3
    # nvfp4 keeps the last layer in high precision, so it keeps the points of the phase before.
    assert seen[2] == seen[3] == [nvfp4, nvfp4, bf16]
    assert seen[2][2].startswith(last)
    assert seen[4] == [str(FivePoint())] * 3
    assert schedule.steps == 5
    assert schedule.phase is None


@pytest.mark.parametrize(("total", "expected"), [(1000, [0, 70, 850]), (10, [0, 1, 8]), (3, [0, 0, 3])])
def test_fractions_begin_at_the_nearest_step(total: int, expected: list[int]) -> None:
    schedule = Schedule({0: "bf16", 0.07: "fp8_hybrid", 0.85: None}).start(net(), total)
    for step, phase in zip(expected, ("bf16", "fp8_hybrid", None), strict=True):
        schedule.seek(step)
        assert schedule.phase == phase or step == 0
        if step:
            schedule.seek(step - 1)
            assert schedule.phase != phase


def test_a_phase_is_what_convert_does_on_top_of_the_phase_before() -> None:
    own, by_hand = net(), net()
    schedule = Schedule({0: "mxfp8", 1: {"2": {"act": "e4m3"}}, 2: "nvfp4"}, exclude=["0"]).start(own)
    for phase in ("mxfp8", {"2": {"act": "e4m3"}}, "nvfp4"):
        qsim.convert(by_hand, phase, exclude=["0"])  # type: ignore[arg-type]
        assert [getattr(layer, "points", FivePoint()) for layer in own] == [getattr(layer, "points", FivePoint()) for layer in by_hand]
        assert type(own[0]) is nn.Linear
        schedule.step()


@pytest.mark.parametrize("value", [torch.bfloat16, qsim.format("bf16"), Quantizer("bf16"), "BF16", "bfloat16"])
def test_a_format_rounds_at_all_points(value: Any) -> None:
    model = net()
    Schedule({0: value}).start(model)
    assert points_of(model) == ["act=bf16, weight=bf16, grad=bf16"] * 3


def test_bf16_changes_nothing_in_a_model_in_bfloat16() -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        x = torch.randn(16, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, scheduled = net().bfloat16(), net().bfloat16()
    Schedule({0: "bf16"}).start(scheduled)
    assert all(map(same_bits, gradients(plain), gradients(scheduled)))


def test_the_schedule_leaves_the_generator_alone_after_its_start() -> None:
    model = net()
    schedule = Schedule({0: "bf16", 1: NOISY}).start(model)
    before = torch.get_rng_state()
    schedule.step()
    assert torch.equal(before, torch.get_rng_state())
    again, other = net(), net()
    torch.manual_seed(0)
    assert Schedule({0: NOISY}).start(again).state_dict() != Schedule({0: NOISY}).start(other).state_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
def test_an_interrupted_run_goes_on_to_the_bit_in_each_phase(stop: int) -> None:
    whole = Run(net(), PHASES)
    whole.train(STEPS)
    first = Run(net(), PHASES)
    first.train(stop)
    state = first.state()
    resumed = Run(net(), PHASES, seed=8)
    resumed.load(state)
    resumed.train(STEPS - stop)
    assert all(map(same_bits, whole.model.state_dict().values(), resumed.model.state_dict().values()))
    assert resumed.points.state_dict() == whole.points.state_dict()


LEARNED = FivePoint(act=qsim.points.LSQ("int4"), weight=qsim.points.LSQ("int4"), output=qsim.points.Noise(0.01))


class LearnedRun:
    """A loop whose second phase has parameters of its own, for a model and the state of another run, if any."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.model, self.schedule = net(), Schedule({0: "bf16", 2: LEARNED, 6: "bf16"})
        if state is not None:
            self.schedule.load_state_dict(state["schedule"])
        with pytest.warns(UserWarning, match=r"a later phase adds parameters, such as 0\.act_point\.change, which an optimizer"):
            self.schedule.start(self.model)
        steps = self.added()
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if all(p is not step for step in steps)], 1e-2)
        self.has_steps = False
        self.add()
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def added(self) -> list[Tensor]:
        return [parameter for name, parameter in self.model.named_parameters() if "_point." in name]

    def add(self) -> None:
        if self.schedule.phase is LEARNED and not self.has_steps:
            self.optimizer.add_param_group({"params": self.added(), "lr": 1e-3})
            self.has_steps = True

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.manual_seed(self.schedule.steps)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 32)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.add()

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("schedule", "model", "optimizer")}


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_phase_of_learned_points_trains_and_goes_on_to_the_bit(stop: int) -> None:
    whole, first = LearnedRun(), LearnedRun()
    whole.train(5)
    assert len(whole.added()) == 6
    assert all(change.item() for change in whole.added())
    first.train(stop)
    resumed = LearnedRun(first.state())
    resumed.train(5 - stop)
    assert all(map(same_bits, whole.model.state_dict().values(), resumed.model.state_dict().values()))
    whole.train(2)
    assert whole.added() == []


def test_a_state_may_be_loaded_before_the_start() -> None:
    schedule = Schedule({0: "bf16", 5: "mxfp8"})
    schedule.load_state_dict({"step": 6, "seed": 3})
    model = net()
    assert schedule.start(model).phase == "mxfp8"
    assert model[0].points.act == qsim.recipes.mxfp8().points.act


def test_a_model_that_was_loaded_in_a_phase_keeps_its_histories() -> None:
    model = qsim.convert(net(), DELAYED)
    model(torch.randn(4, 32)).sum().backward()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    schedule = Schedule({0: "bf16", 3: DELAYED})
    schedule.load_state_dict({"step": 4, "seed": 3})
    schedule.start(model)
    assert before
    assert before.keys() == dict(model.named_buffers()).keys()
    assert all(same_bits(before[name], buffer) for name, buffer in model.named_buffers())
    model.eval()(torch.randn(4, 32))  # which needs a history


@pytest.mark.slow
@pytest.mark.parametrize("phases", [{0: "bf16", 1: "nvfp4", 2: "bf16", 3: "nvfp4"}, {0: None, 1: NOISY, 2: None, 3: NOISY}])
def test_compiled_graphs_are_kept_for_each_phase(phases: dict[int | float, Any]) -> None:
    graphs = 0

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    model, x = net(), torch.randn(16, 32)
    compiled = torch.compile(model, backend=backend)
    schedule, counts = Schedule(phases).start(model), []
    for _ in phases:
        compiled(x).sum().backward()
        counts.append(graphs)
        schedule.step()
    assert counts[0] < counts[1] == counts[2] == counts[3]


@pytest.mark.slow
def test_compiled_phases_compute_the_bits_of_eager_ones() -> None:
    torch._dynamo.reset()
    eager, other = net(), net()
    compiled = torch.compile(other, backend="eager")
    torch.manual_seed(1)
    schedules = [Schedule({0: "bf16", 1: "nvfp4", 2: "e4m3", 3: "bf16"})]
    schedules.append(Schedule({0: "bf16", 1: "nvfp4", 2: "e4m3", 3: "bf16"}))
    schedules[0].start(eager)
    schedules[1].start(other)
    seen = []
    for _ in range(4):
        x = torch.randn(16, 32)
        seen.append(eager(x))
        assert same_bits(seen[-1], compiled(x))
        for schedule in schedules:
            schedule.step()
    assert not same_bits(seen[0], seen[1])


def test_an_optimizer_has_phases_and_its_compensation_ends_with_kahan() -> None:
    run = Run(net(), {0: None})
    weight = run.model.get_parameter("0.weight")
    run.train(3)
    assert run.optimizer.param_groups[0]["update"] == "stochastic"
    assert "compensation" not in run.optimizer.state[weight]
    run.train(4)
    assert run.optimizer.param_groups[0]["update"] == "kahan"
    assert "compensation" in run.optimizer.state[weight]


def test_products_outside_of_layers_follow_the_phases() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(8, 32), nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.linear(self.layer(self.table(ids)), self.table.weight)

    model, ids = Tied(), torch.arange(8)
    schedule, shares = Schedule({0: "mxfp8", 1: None, 2: "mxfp8"}).start(model), []
    for _ in range(3):
        shares.append(qsim.coverage(model, ids).share)
        schedule.step()
    assert shares == [1.0, 0.0, 1.0]
    assert qsim.coverage(model, ids).products == qsim.coverage(qsim.convert(Tied(), "mxfp8"), ids).products


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": (["bf16"], TypeError, "phases must be a mapping of where each begins, got ['bf16']"),
    "nothing": ({}, ValueError, "the first phase must begin at 0 (None is full precision), got no phases"),
    "later": ({5: "bf16"}, ValueError, "the first phase must begin at 0 (None is full precision), got [5]"),
    "text": ({"0": "bf16"}, TypeError, "a phase begins at a step or at a fraction of the run, got '0'"),
    "a flag": ({False: "bf16"}, TypeError, "a phase begins at a step or at a fraction of the run, got False"),
    "negative": ({0: "bf16", -1: None}, ValueError, "a phase begins at a step from 0 on, or at a fraction in [0, 1), got -1"),
    "one": ({0: "bf16", 1.0: None}, ValueError, "a phase begins at a step from 0 on, or at a fraction in [0, 1), got 1.0"),
    "NaN": ({0: "bf16", float("nan"): None}, ValueError, "at a fraction in [0, 1), got nan"),
    "unsorted": ({0: "bf16", 0.8: None, 0.1: "nvfp4"}, ValueError, "phases must be in order, got [0, 0.8, 0.1]"),
    "mixed": ({0: "bf16", 0.5: None, 100: "nvfp4"}, ValueError, "at steps or at fractions of the run, not at both: got [0, 0.5, 100]"),
    "unknown": ({0: "nvfp5"}, ValueError, "Schedule: 'nvfp5' is neither a recipe (fp8_hybrid, "),
    "a recipe for any format": ({0: "weight_only"}, ValueError, "the recipe weight_only is for any format: say which"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_phases(case: str) -> None:
    phases, kind, message = WRONG[case]
    with pytest.raises(kind) as error:
        Schedule(phases)
    assert message in str(error.value)


def test_a_fraction_needs_the_length_of_the_run() -> None:
    with pytest.raises(ValueError, match=r"begin at fractions of the run, 0, 0\.5, and its length is not known: give total_steps"):
        Schedule({0: "bf16", 0.5: "nvfp4"}).start(net())


def test_a_schedule_starts_before_it_steps() -> None:
    with pytest.raises(RuntimeError, match=r"start it first, with schedule\.start\(model\)"):
        Schedule({0: "bf16"}).step()


def test_what_a_target_cannot_have_is_an_error_at_the_start() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"start takes a torch\.nn\.Module or an optimizer of qsim\.optim, got SGD"):
        Schedule({0: "bf16"}).start(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="pattern 'head' matches"):
        Schedule({0: "bf16", 1000: {"head": {"act": "e4m3"}}}).start(model)
    optimizer = qsim.optim.SGD(model.parameters(), lr=0.1, update="nearest")
    with pytest.raises(TypeError, match="a phase of an optimizer is a dictionary of its options, got FivePoint"):
        Schedule({0: {"update": "nearest"}, 1000: "bf16"}).start(optimizer)
    with pytest.raises(ValueError, match="options of rounding are format, update, state, state_rounding, arithmetic, overflow; got 'lr'"):
        Schedule({0: {"lr": 0.1}}).start(optimizer)
    with pytest.raises(ValueError, match="update must be 'stochastic'"):
        Schedule({0: {"update": "nearest"}, 1000: {"update": "random"}}).start(optimizer)
    assert optimizer.param_groups[0]["update"] == "nearest"


def test_a_state_of_something_else() -> None:
    with pytest.raises(ValueError, match="a state has step and seed, got last_epoch"):
        Schedule({0: "bf16"}).load_state_dict({"last_epoch": 3})


def test_it_prints_its_phases() -> None:
    assert repr(Schedule({0: "bf16", 0.5: None}, total_steps=9)) == "Schedule({0: 'bf16', 0.5: None}, total_steps=9)"
