"""Given scales, and scales computed from a layer's earlier inputs."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from qsim.scaling import Delayed, Given
from support.points import in_order


def spec(history: int = 4, fmt: str = "e4m3", **how: object) -> Quantizer:
    return Quantizer(fmt, scale=Delayed(history, **how))  # type: ignore[arg-type]


def by_amax(x: Tensor, amax: float, fmt: str = "e4m3") -> Tensor:
    """A tensor with the scale that maps a magnitude to the largest value."""
    scale = float(torch.tensor(amax, dtype=torch.float64) / qsim.format(fmt).max)
    return qsim.quantize(x, fmt, scale=Given(scale))


def linear(**points: object) -> qsim.nn.Linear:
    torch.manual_seed(0)
    return qsim.nn.Linear(8, 5, bias=False, points=FivePoint(**points))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.25, 0.1, 3.7, 2.0**-127])
def test_given(value: float) -> None:
    x = torch.tensor([0.0, 0.3, -1.7, 60.0]) * value
    s = torch.tensor(value)
    assert torch.equal(qsim.quantize(x, "e2m1", scale=Given(value)), qsim.quantize(x * (1 / s), "e2m1") * s)
    assert Given(0.1) == qsim.scaling.resolve(repr(Given(0.1)))
    layer = qsim.nn.functional.linear(x[None], x[None], points=in_order(*[Quantizer("e2m1", scale=Given(value))] * 2))
    once = qsim.quantize(x * (1 / s), "e2m1").square().sum()
    assert torch.equal(layer, (once * s * s).view(1, 1))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Given(0.0), ValueError, "2\\*\\*-127"),
        (lambda: Given(-1.0), ValueError, "2\\*\\*-127"),
        (lambda: Given(math.nan), ValueError, "nan"),
        (lambda: Given(1e39), ValueError, "largest"),
        (lambda: Given("1"), TypeError, "must be a number"),
        (lambda: Delayed(0), ValueError, "history"),
        (lambda: Delayed(rule="last"), ValueError, "rule"),
        (lambda: qsim.quantize(torch.ones(3), "e4m3", scale=Delayed()), ValueError, "delayed scales live in a module"),
        (lambda: spec()(torch.ones(3)), ValueError, "delayed scales live in a module"),
        (lambda: functional.linear(torch.ones(1, 3), torch.ones(1, 3), points=FivePoint(grad=spec())), ValueError, "live in a module"),
        (lambda: qsim.nn.MultiheadAttention(8, 2, points=FivePoint(act=spec(), act_bwd=None)), ValueError, "layers of one product"),
    ],
)
def test_invalid_input_raises_errors(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_attention_is_refused_before_any_layer_is_converted() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    with pytest.raises(ValueError, match=r"convert: 1: MultiheadAttention: delayed"):
        qsim.convert(model, FivePoint(act=spec(), act_bwd=None))
    assert type(model[0]) is nn.Linear


def test_a_scale_follows_from_the_largest_of_the_last_tensors() -> None:
    layer = linear(act=spec(3))
    amaxes: list[float] = []
    for step in range(9):
        x = torch.randn(4, 8) * 2.0 ** (3 - step)
        expected = by_amax(x, max(amaxes[-3:], default=float(x.abs().max())))
        torch.testing.assert_close(layer(x), expected @ layer.weight.t(), rtol=1e-5, atol=1e-6)
        amaxes.append(float(x.abs().max()))
        assert sorted(layer.act_amaxes.tolist(), reverse=True)[: len(amaxes)] == sorted(amaxes[-3:], reverse=True)
        assert int(layer.act_recorded) == step + 1
    assert not torch.equal(layer(x), by_amax(x, amaxes[-1]) @ layer.weight.t())  # its own would have been different


@pytest.mark.parametrize("how", [{"margin": 2}, {"format": "e8m0", "rule": "ceil"}])
def test_margin_and_format_are_those_of_other_scales(how: dict[str, object]) -> None:
    layer = linear(act=spec(**how))
    x = torch.randn(4, 8)
    expected = qsim.quantize(x, "e4m3", scale=qsim.scaling.PerTensor(**how))  # type: ignore[arg-type]
    torch.testing.assert_close(layer(x), expected @ layer.weight.t(), rtol=1e-5, atol=1e-6)


def test_gradients_and_weights_have_histories_too() -> None:
    layer = linear(act=spec(), weight=spec(), act_bwd="same", weight_bwd="same", grad=spec(fmt="e5m2"))
    assert [name for name in layer.state_dict() if name.endswith("amaxes")] == [f"{n}_amaxes" for n in ("act", "weight", "grad")]
    x1, x2, g1, g2 = torch.randn(4, 8), 3 * torch.randn(4, 8), torch.randn(4, 5), torch.randn(4, 5) / 64
    layer(x1).backward(g1)
    layer.weight.grad = None
    w = by_amax(layer.weight.detach(), float(layer.weight.detach().abs().max()))
    a = x2.clone().requires_grad_()
    layer(a).backward(g2)
    rounded_g, rounded_x = by_amax(g2, float(g1.abs().max()), "e5m2"), by_amax(x2, float(x1.abs().max()))
    torch.testing.assert_close(a.grad, rounded_g @ w, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(layer.weight.grad, rounded_g.t() @ rounded_x, rtol=1e-5, atol=1e-6)
    assert layer.grad_amaxes.tolist() == [float(g1.abs().max()), float(g2.abs().max()), 0, 0]  # once for both products


def test_evaluation_only_reads() -> None:
    layer = linear(act=spec())
    with pytest.raises(RuntimeError, match=r"delayed scale of act has no history yet: run a training step first"):
        layer.eval()(torch.randn(2, 8))
    x = torch.randn(4, 8)
    layer.train()(x)
    before = copy.deepcopy(layer.state_dict())
    small = x / 100
    found = layer.eval()(small)
    torch.testing.assert_close(found, by_amax(small, float(x.abs().max())) @ layer.weight.t(), rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), layer.state_dict().values(), strict=True))


def test_zeros_and_what_is_not_finite_leave_no_trace() -> None:
    layer = linear(act=spec())
    layer(torch.zeros(2, 8))
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer(x), by_amax(x, float(x.abs().max())) @ layer.weight.t(), rtol=1e-5, atol=1e-6)
    for bad in (math.inf, math.nan):
        broken = x.clone()
        broken[0, 0] = bad
        assert layer(broken).isnan().all()  # as with a scale from this tensor
    assert float(layer.act_amaxes.amax()) == float(x.abs().max())
    assert layer(torch.randn(0, 8)).shape == (0, 5)


def steps(model: nn.Module, first: int, last: int) -> list[Tensor]:
    """Take some training steps; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(first, last):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def network(history: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    delayed = spec(history)
    return qsim.convert(model, FivePoint(delayed, delayed, act_bwd="same", weight_bwd="same", grad=spec(history, "e5m2")))


@pytest.mark.parametrize("split", [1, 3, 7])
def test_a_run_goes_on_as_if_it_had_not_stopped(split: int, tmp_path: Path) -> None:
    whole = steps(network(), 0, 9)
    model = network()
    first = steps(model, 0, split)
    torch.save(model.state_dict(), tmp_path / "saved")
    other = network()
    other.load_state_dict(torch.load(tmp_path / "saved"))
    assert all(map(torch.equal, whole, first + steps(other, split, 9)))
    other = network()
    other.load_state_dict(torch.load(tmp_path / "saved"))
    assert other.eval()(torch.randn(2, 8)).isfinite().all()  # the existence of a history was loaded too
    fresh = network()
    fresh.load_state_dict(network().state_dict())
    with pytest.raises(RuntimeError, match="no history yet"):
        fresh.eval()(torch.randn(2, 8))


def test_copies_have_histories_of_their_own() -> None:
    model = network()
    steps(model, 0, 3)
    for twin in (copy.deepcopy(model), _pickled(model)):
        before = copy.deepcopy(model.state_dict())
        apart = steps(copy.deepcopy(model), 3, 6)
        assert all(map(torch.equal, apart, steps(twin, 3, 6)))
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_records_once_and_repeats_its_numbers(reentrant: bool) -> None:
    plain, again = network(), network()
    for step in range(4):
        x = torch.randn(6, 8) * (4 - step)
        results = []
        for model, run in ((plain, plain), (again, lambda x: checkpoint(again, x, use_reentrant=reentrant))):
            model.zero_grad()
            a = x.clone().requires_grad_()
            y = run(a)
            y.square().mean().backward()
            results.append([y.detach(), a.grad, *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *results))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), again.state_dict().values(), strict=True))


def test_converting_makes_histories_and_reverting_drops_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    names = list(model.state_dict())
    qsim.convert(model, FivePoint(act=spec(), grad=spec(), act_bwd=None), exclude=["1"])
    assert {name for name in model.state_dict() if name not in names} == {
        f"0.{point}_{part}" for point in ("act", "grad") for part in ("amaxes", "recorded")
    }
    model(torch.randn(2, 8))
    kept = model[0].act_amaxes
    qsim.convert(model, FivePoint(act=spec(), act_bwd=None), exclude=["1"])  # entries that fit are kept
    assert model[0].act_amaxes is kept
    assert [name for name in model.state_dict() if name not in names] == ["0.act_amaxes", "0.act_recorded"]
    qsim.convert(model, FivePoint(act=spec(8), act_bwd=None), exclude=["1"])
    assert len(model[0].act_amaxes) == 8
    qsim.convert(model, FivePoint(act="e4m3", act_bwd=None))
    assert list(model.state_dict()) == names
    qsim.convert(model, FivePoint(act=spec(), act_bwd=None))
    qsim.revert(model)
    assert list(model.state_dict()) == names
    assert type(model[0]) is nn.Linear


def test_points_may_be_exchanged() -> None:
    layer = linear(act=spec())
    layer(torch.randn(2, 8))
    layer.points = FivePoint(act=spec(), weight=spec(8), act_bwd=None, weight_bwd=None)
    layer(torch.randn(2, 8))
    assert int(layer.act_recorded) == 2
    assert int(layer.weight_recorded) == 1


def test_histories_keep_their_dtype() -> None:
    layer = linear(act=spec()).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    layer(x)
    assert layer.act_amaxes.dtype == torch.float32
    assert layer.double().act_recorded.dtype == torch.int64
    assert float(layer.act_amaxes[0]) == float(x.abs().max())


def test_histories_of_the_meta_device_start_empty() -> None:
    """torch's `to_empty` leaves in memory what was there before."""
    with torch.device("meta"):
        layer = linear(act=spec())
    moved = layer._apply(lambda x: torch.full_like(x, 7, device="cpu"))
    assert (moved.act_amaxes == 0).all()
    assert int(moved.act_recorded) == 0
    assert (moved.weight == 7).all()


@pytest.mark.parametrize("name", ["Conv2d", "Embedding", "Quantize"])
def test_other_modules(name: str) -> None:
    if name == "Conv2d":
        layer: nn.Module = qsim.nn.Conv2d(3, 4, 3, points=FivePoint(act=spec(), weight=spec(), grad=spec(), act_bwd=None, weight_bwd=None))
        inputs, names = torch.randn(2, 3, 6, 6), ("act", "weight", "grad")
    elif name == "Embedding":
        layer = qsim.nn.Embedding(7, 4, points=FivePoint(weight=spec(), grad=spec(), weight_bwd=None))
        inputs, names = torch.tensor([[1, 2]]), ("weight", "grad")
    else:
        layer = qsim.nn.Quantize(forward=spec(), backward=spec())
        inputs, names = torch.randn(3, 5, requires_grad=True), ("forward_point", "backward_point")
    for _ in range(2):
        y = layer(inputs)
        y.backward(torch.ones_like(y))
    for point in names:
        assert int(layer.get_buffer(f"{point}_recorded")) == 2, point
    assert layer.eval()(inputs).isfinite().all()
    if name == "Quantize":
        torch.testing.assert_close(layer(inputs), by_amax(inputs.detach(), float(inputs.abs().max())))


def test_compiled_code_says_what_it_cannot_do() -> None:
    layer = linear(act=spec())
    torch._dynamo.reset()
    with pytest.raises(Exception, match="delayed scales"):
        torch.compile(layer, fullgraph=True)(torch.randn(2, 8))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_models_leave_delayed_scales_to_eager_code() -> None:
    """They resume after them, and must not compile the operators that run in between."""
    model = nn.Sequential(linear(act=spec(), weight=spec()), nn.ReLU())
    compiled, x = copy.deepcopy(model), torch.randn(4, 8)
    call = torch.compile(compiled, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(call(x), model(x))
    assert all(map(torch.equal, compiled.state_dict().values(), model.state_dict().values()))


def test_non_finite_values_stay_visible() -> None:
    spec = qsim.Quantizer("e4m3", scale=Delayed(4))
    layer = qsim.nn.Linear(2, 1, bias=False, points=qsim.FivePoint(act=spec, grad=spec, act_bwd=None))
    torch.nn.init.ones_(layer.weight)
    layer(torch.ones(1, 2)).sum().backward()
    for bad in (math.inf, math.nan):
        assert layer(torch.tensor([[bad, 1.0]])).isnan().all()
    layer.weight.grad = None
    layer(torch.ones(1, 2)).backward(torch.tensor([[math.inf]]))
    assert layer.weight.grad.isnan().all()
    # It does not enter the history.
    assert layer(torch.ones(1, 2)).item() == 2


def test_a_module_has_histories_for_the_points_that_it_was_made_with() -> None:
    module = qsim.nn.Quantize(forward="e4m3")
    module.forward_point = qsim.Quantizer("e4m3", scale=Delayed(4))
    with pytest.raises(ValueError, match="forward_point has a delayed scale, for which there is no history yet"):
        module(torch.ones(2))
