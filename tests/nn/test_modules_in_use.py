"""Uses of modules with points: copies, other parameters, hooks, checkpoints, autocast, compilers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits
from support.module_cases import FEW, NEAREST, NOISY, ModuleCase, few

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in ("Using padding='same'", "`torch.jit.script")]


def _loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@few
@pytest.mark.parametrize("made_again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _loaded], ids=["copy", "pickle", "save"])
def test_survives_being_copied(case: ModuleCase, made_again: Callable[[nn.Module], Any]) -> None:
    module = case.own(NOISY)
    module.stream = 5
    other = made_again(module)
    assert (type(other), other.points, other.stream) == (type(module), module.points, 5)
    assert all(map(same_bits, case.run(other), case.run(module)))
    assert not {x.data_ptr() for x in other.parameters()} & {x.data_ptr() for x in module.parameters()}


def test_functional_call_takes_other_parameters() -> None:
    module = qsim.nn.Linear(4, 2, points=NEAREST)
    w, x = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    own = torch.func.functional_call(module, {"weight": w, "bias": torch.zeros(2)}, (x,))
    expected = functional.linear(x, w, torch.zeros(2), NEAREST)
    assert same_bits(own, expected)
    assert same_bits(*(torch.autograd.grad(y.square().sum(), w)[0] for y in (own, expected)))


@few
def test_gradients_of_gradients_are_refused(case: ModuleCase) -> None:
    module = case.own(NEAREST)
    value = module(case.input(), **case.call)
    # After a sum the gradient of the value has no history of its own: torch's own check would not notice.
    for total in (value.square().sum(), value.sum()):
        with pytest.raises(RuntimeError, match="rounding at points cannot be differentiated twice: omit create_graph=True"):
            torch.autograd.grad(total, module.weight, create_graph=True, retain_graph=True)  # type: ignore[arg-type]


@few
def test_evaluation_rounds_as_configured(case: ModuleCase) -> None:
    module = case.own(NOISY)
    trained = case.run(module)
    assert all(map(same_bits, case.run(module.eval()), trained))
    torch.manual_seed(7)
    with torch.no_grad():
        value = module(case.input(), **case.call)
    assert not value.requires_grad
    assert same_bits(value, trained[0])


def test_hooks_see_what_passes() -> None:
    module, x = qsim.nn.Linear(4, 2, points=NEAREST), torch.randn(3, 4, requires_grad=True)
    seen: list[str] = []
    module.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    module.register_forward_hook(lambda module, inputs, output: seen.append("after"))
    module.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("weight"))
    module(x).sum().backward()
    assert sorted(seen) == ["after", "backward", "before", "weight"]


@few
def test_checkpointing_replays_the_noise(case: ModuleCase) -> None:
    module, x = case.own(NOISY), case.input()

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(4)
        value = call(x)
        torch.rand(2)
        return [value.detach(), *torch.autograd.grad(value.square().sum(), list(module.parameters()))]

    expected = gradients(lambda x: module(x, **case.call))
    found = gradients(lambda x: checkpoint(lambda x: module(x, **case.call), x, use_reentrant=False))
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("case", FEW[:4], ids=str)
def test_autocast_rounds_operands_as_they_are_and_gives_what_autocast_gives(case: ModuleCase) -> None:
    module, x = case.own(NEAREST), case.input()
    with torch.autocast("cpu", torch.bfloat16):
        value, native = module(x, **case.call), case.torchs()(x, **case.call)
    assert value.dtype == native.dtype == torch.bfloat16
    plain = copy.deepcopy(module)
    if plain.bias is not None:
        plain.bias.data = plain.bias.data.bfloat16().float()
    assert same_bits(value, plain(x, **case.call).bfloat16())
    value.float().sum().backward()
    assert {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None} == {torch.float32}


# Compiled code. A model of several kinds of layers.


class Small(nn.Module):
    """A convolution, an embedding, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular")
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)  # type: ignore[no-any-return]


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """A model's value and the gradients of its parameters."""
    value = forward(x)
    return [value.detach(), *torch.autograd.grad(value.square().mean(), list(model.parameters()))]


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits() -> None:
    # float32 points and a compiler that keeps the order of operations; weights are noisy, but unchanged.
    points = qsim.FivePoint("e4m3", Quantizer("e4m3", "stochastic"), act_bwd="e4m3", weight_bwd="same", grad="e5m2")
    model = qsim.convert(Small(), points, embeddings=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randint(6, (2, 6))
    assert all(map(same_bits, gradients(model, compiled, x), gradients(model, model, x)))


@pytest.mark.slow
def test_compiled_code_of_any_size_draws_again() -> None:
    # Stochastic rounding is one operator in compiled code: others decompose into many, which take long to trace with varying sizes.
    model = qsim.convert(Small(), NOISY, embeddings=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (2, 5):
        x = torch.randint(6, (rows, 4 + rows))
        torch._dynamo.mark_dynamic(x, [0, 1])
        first, second = (gradients(model, compiled, x) for _ in range(2))
        assert first[0].shape == (rows, 4 + rows, 6)
        assert all(not torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_inductor_trains_as_eager_code_does() -> None:
    torch.manual_seed(0)
    model = qsim.convert(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Conv1d(5, 4, 3)), NEAREST)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(3, 5, 8)
    for own, expected in zip(gradients(model, compiled, x), gradients(model, model, x), strict=True):
        # Sums in another order may move a value across a midpoint: a few elements differ by one step.
        far = (own - expected).abs() > 1e-5 + 1e-4 * expected.abs()
        assert far.float().mean() < 0.05
        torch.testing.assert_close(own, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


@pytest.mark.slow
def test_converting_a_compiled_model_takes_effect() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(x)
    qsim.convert(model, NEAREST)
    assert same_bits(compiled(x), functional.linear(x, model[0].weight, model[0].bias, NEAREST))
    qsim.revert(model)
    assert same_bits(compiled(x), before)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("points", ["e4m3", "fp32", Quantizer("e4m3", scale="tensor")], ids=["e4m3", "fp32", "scaled"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_results_may_be_changed_in_place(points: Any, compiled: bool) -> None:
    """As by an activation in place, or by adding a residual to it; the gradient is that of the same out of place."""
    own = qsim.nn.Linear(4, 4, points=FivePoint(act=points, weight=points, act_bwd="same", weight_bwd="same"))
    between = qsim.nn.Quantize("e4m3", "e5m2")
    in_place, usual = (nn.Sequential(own, nn.ReLU(inplace), between, nn.ReLU(inplace)) for inplace in (True, False))
    torch._dynamo.reset()
    call = torch.compile(in_place, backend="aot_eager", fullgraph=True) if compiled else in_place
    x = torch.randn(2, 3, 4)
    assert all(map(same_bits, gradients(own, call, x), gradients(own, usual, x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Linear", "MultiheadAttention"])
def test_strict_exports_draw_the_noise_of_the_module(name: str) -> None:
    """Dynamo traces modules for them, up to the streams of their weights."""
    torch.manual_seed(0)
    layer, inputs = (
        (nn.Linear(8, 8), (torch.randn(4, 8),)) if name == "Linear" else (nn.MultiheadAttention(8, 2), (torch.randn(4, 2, 8),) * 3)
    )
    model = qsim.convert(layer, FivePoint("e4m3", Quantizer("e4m3", "stochastic"))).eval()
    exported, eager = torch.export.export(model, inputs, strict=True).module()(*inputs), model(*inputs)
    assert torch.equal(*((y if isinstance(y, Tensor) else y[0]) for y in (exported, eager)))
