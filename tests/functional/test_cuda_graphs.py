"""CUDA graphs: captured calls draw fresh noise, and read their inputs and seed, in every replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint
from qsim.cli.bench._timing import replay
from qsim_kernels.chip import factored
from support.calls import noisy, same, seeded
from support.cuda_graphs import captured

pytest.importorskip("triton")

from qsim_kernels.triton.scaled import whole

pytestmark = pytest.mark.gpu


def test_replays_draw_fresh_noise() -> None:
    x = torch.full((4096,), 1.0625, device="cuda")
    graph, result = captured(lambda: noisy(x))
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append(result.clone())
    assert [(i, j) for i in range(3) for j in range(i) if torch.equal(draws[i], draws[j])] == []
    assert all(set(draw.unique().tolist()) == {1.0, 1.125} for draw in draws)


def test_generator_registered_with_the_graph() -> None:
    x = torch.full((4096,), 1.0625, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    call = lambda: qsim.quantize(x, "e4m3", rounding="stochastic", generator=generator)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(first, result)


def test_seed_tensor_is_read_at_every_replay() -> None:
    x = torch.full((4096,), 1.0625, device="cuda")
    seed = torch.tensor(1, device="cuda")
    graph, result = captured(lambda: seeded(x, seed))
    for number in (1, 2, -7, 2**62):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(result, seeded(x, number))


def test_what_plain_torch_computes_reads_its_seed_at_every_replay() -> None:
    x, seed = torch.randn(8, 64, dtype=torch.float64, device="cuda"), torch.tensor(1, device="cuda")
    call = lambda source: qsim.quantize(x, "mxfp4", rounding="stochastic", seed=source)  # noqa: E731
    graph, result = captured(lambda: call(seed))
    for number in (1, 2, -7, 2**62):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(result, call(number))


SUMS = [
    qsim.accumulators.Rounded("bf16", rounding="stochastic"),
    qsim.accumulators.Rounded("bf16", chunk=32, rounding="stochastic"),
    qsim.accumulators.Promoted(qsim.accumulators.Rounded("e5m6", rounding="stochastic"), 64),
]


@pytest.mark.parametrize("accumulate", SUMS, ids=str)
def test_stochastic_sums(accumulate: qsim.accumulators.Accumulator) -> None:
    """Replays draw fresh noise for every sum, and read a seed from its tensor."""
    a, b = torch.randn(64, 128, device="cuda").bfloat16(), torch.randn(128, 48, device="cuda").bfloat16()
    graph, result = captured(lambda: qsim.matmul(a, b, accumulate))
    draws = [qsim.matmul(a, b, accumulate, chip="never", seed=1)]
    for _ in range(3):
        graph.replay()
        draws.append(result.clone())
    assert [(i, j) for i in range(4) for j in range(i) if torch.equal(draws[i], draws[j])] == []
    seed = torch.tensor(1, device="cuda")
    graph, result = captured(lambda: qsim.matmul(a, b, accumulate, seed=seed))
    for number in (1, 2**62):
        seed.fill_(number)
        graph.replay()
        assert same(result, qsim.matmul(a, b, accumulate, seed=number))


def test_inputs_are_read_at_every_replay() -> None:
    x = torch.zeros(4096, device="cuda")
    graph, result = captured(lambda: qsim.quantize(x, "e4m3", dtype=torch.bfloat16))
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert same(result, qsim.quantize(x, "e4m3", dtype=torch.bfloat16))


def test_encode_without_a_check() -> None:
    x = torch.randn(4096, device="cuda")
    graph, result = captured(lambda: qsim.encode(x, "e2m1", check=False))
    x.normal_()
    graph.replay()
    assert torch.equal(result, qsim.encode(x, "e2m1"))


def test_encode_with_a_check_is_refused() -> None:
    x = torch.randn(4096, device="cuda")
    qsim.encode(x, "e2m1")
    torch.cuda.synchronize()
    refused = pytest.raises(RuntimeError, match="cannot be read back while a CUDA graph is captured; pass check=False")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        qsim.encode(x, "e2m1")


def test_compiled_into_graphs() -> None:
    x = torch.full((4096,), 1.0625, device="cuda")
    compiled = torch.compile(noisy, fullgraph=True, mode="reduce-overhead")
    warmup, _, *replays = [compiled(x).clone() for _ in range(6)]  # the first replay may repeat the warm-up's noise: see the limitations
    draws = [warmup, *replays]
    assert [(i, j) for i in range(5) for j in range(i) if torch.equal(draws[i], draws[j])] == []


NOISE = qsim.Quantizer("e4m3", "stochastic")
POINTS = {"fp8_hybrid": "fp8_hybrid", "nvfp4": "nvfp4", "stochastic": FivePoint(NOISE, NOISE, NOISE, act_bwd=NOISE, weight_bwd=NOISE)}


@pytest.mark.parametrize("name", POINTS)
def test_training_compiled_into_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants are made while a graph warms up, and seeds of the backward pass are drawn in the forward pass."""
    for module, kept in ((factored, "_zeros"), (whole, "_states")):
        monkeypatch.setattr(module, kept, {})
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda", torch.bfloat16)
    qsim.convert(model, POINTS[name])
    x, compiled = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16), torch.compile(model, mode="reduce-overhead")

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        model.zero_grad()
        call(x).float().square().sum().backward()
        return model[0].weight.grad.clone()  # type: ignore[union-attr, operator, no-any-return]

    *_, first, second = (gradient(compiled) for _ in range(5))
    assert torch.equal(first, second) == (name == "fp8_hybrid")
    expected = gradient(model)
    assert (first - expected).norm() < 0.5 * expected.norm()


def layer_and_step(points: FivePoint) -> tuple[qsim.nn.Linear, Tensor, Callable[[], None]]:
    """A layer, the tensor of its weight's gradient, and the step that writes it."""
    layer = qsim.nn.Linear(64, 32, bias=False, device="cuda", points=points)
    x, gradient = torch.randn(128, 64, device="cuda"), torch.zeros(32, 64, device="cuda")

    def step() -> None:
        (found,) = torch.autograd.grad(layer(x).square().mean(), layer.weight)
        gradient.copy_(found)

    return layer, gradient, step


def test_replayed_layers_see_what_became_of_their_weights() -> None:
    layer, gradient, step = layer_and_step(FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="same", grad="e5m2"))
    again = replay(step)
    for _ in range(3):
        with torch.no_grad():
            layer.weight.mul_(-1.5)
        gradient.zero_()
        again()
        replayed = gradient.clone()
        step()
        assert replayed.abs().sum() > 0
        torch.testing.assert_close(replayed, gradient, rtol=1e-5, atol=1e-6)


def test_replayed_layers_draw_fresh_noise() -> None:
    for point in ("act", "act_bwd", "grad"):
        _, gradient, step = layer_and_step(
            FivePoint(**{"act_bwd": None, "weight_bwd": None, point: qsim.Quantizer("e4m1", rounding="stochastic")})
        )
        again = replay(step)
        again()
        first = gradient.clone()
        again()
        assert not torch.equal(first, gradient), point


def test_replayed_layers_add_with_fresh_noise() -> None:
    for product in range(3):
        accumulate = [None, None, None]
        accumulate[product] = SUMS[0]  # type: ignore[call-overload]
        _, gradient, step = layer_and_step(
            FivePoint("bf16", "bf16", grad="bf16", accumulate=tuple(accumulate), act_bwd=None, weight_bwd=None)
        )
        again = replay(step)
        again()
        first = gradient.clone()
        again()
        # The sums of a gradient of the input are not those of the weight's.
        assert torch.equal(first, gradient) == (product == 1), product


def test_replayed_layers_keep_a_weights_noise_until_it_changes() -> None:
    layer, gradient, step = layer_and_step(FivePoint(weight=qsim.Quantizer("e4m1", rounding="stochastic"), weight_bwd=None))
    again = replay(step)
    again()
    first = gradient.clone()
    again()
    assert torch.equal(first, gradient)
    with torch.no_grad():
        layer.weight.mul_(-1)
    again()
    negated = gradient.clone()
    with torch.no_grad():
        layer.weight.mul_(-1)
    again()
    assert torch.equal(first, gradient)
    # Without a bias, the same bits would only change the gradient's sign.
    assert not torch.equal(first, -negated)
