"""torch.compile: the same bits, forwards and backwards, fresh noise per call, and no recompilation for values that change per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.formats import Float
from qsim.random import Noise
from support.calls import CALLS, noisy, points, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture
def x(device: torch.device) -> Tensor:
    """Four rows of three values."""
    return points(device)


@pytest.mark.parametrize("layout", ["in order", pytest.param("transposed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["inductor", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_gives_the_same_bits(x: Tensor, backend: str, layout: str) -> None:
    if layout == "transposed":
        x = x.t()

    # One graph of all calls compiles in the time of a few.
    def call(x: Tensor) -> dict[str, Tensor]:
        return {name: one(x) for name, one in CALLS.items() if name != "packed" or x.is_contiguous()}

    compiled = torch.compile(call, fullgraph=True, backend=backend)(x)
    for name, due in call(x).items():
        assert same(compiled[name], due), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_writes_its_argument(x: Tensor, backend: str) -> None:
    def step(weight: Tensor) -> None:
        qsim.quantize_(weight, "e4m3", rounding="stochastic", seed=1)

    whole, other = x.clone(), x.clone()
    torch.compile(step, fullgraph=True, backend=backend)(whole[:, 1:])
    step(other[:, 1:])
    assert same(whole, other)
    assert not same(whole, x)


WEIGHTS = [1.0, -2.0, 4.0, 8.0, 16.0, -32.0, 64.0]


def training(x: Tensor) -> Tensor:
    """A loss with two roundings, one of which clips its gradient and changes the dtype. Everything after them is exact."""
    inner = qsim.quantize(x * 2, "e4m3", rounding="stochastic", seed=3, clip_gradient=True, dtype=torch.bfloat16)
    coarse = qsim.quantize(inner.float() / 8, "e2m1")
    return (coarse * torch.tensor(WEIGHTS, device=x.device)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward(device: torch.device, backend: str) -> None:
    values = torch.tensor([0.3, -1.7, 1000.0, -500.0, 0.01, 223.0, 225.0], device=device)
    eager, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss = training(eager)
    compiled = torch.compile(training, fullgraph=True, backend=backend)(other)
    assert torch.equal(loss, compiled)
    loss.backward()
    compiled.backward()
    assert eager.grad is not None
    assert other.grad is not None
    # 1000, -500 and 225 are beyond 448 when doubled.
    assert other.grad.tolist() == [0.25, -0.5, 0, 0, 4, -8, 0]
    assert torch.equal(eager.grad, other.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_draw_fresh_noise(device: torch.device, backend: str) -> None:
    x = torch.full((256,), 1.0625, device=device)
    compiled = torch.compile(lambda x: (noisy(x), noisy(x)), fullgraph=True, backend=backend)

    def drawn() -> list[Tensor]:
        torch.manual_seed(4)
        return [rounded for _ in range(3) for rounded in compiled(x)]

    first = drawn()
    assert all(not torch.equal(first[i], first[j]) for i in range(6) for j in range(i)), "within a graph and between its calls"
    assert all(map(torch.equal, drawn(), first))
    torch.manual_seed(5)
    assert not torch.equal(compiled(x)[0], first[0])


@pytest.mark.slow
def test_checkpointing_replays_the_same_noise(device: torch.device) -> None:
    x = torch.full((256,), 1.0625, device=device, requires_grad=True)

    @torch.compile(fullgraph=True, backend="inductor")
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = checkpoint(lambda x: noisy(x).square(), x, use_reentrant=False)
        return rounded, rounded.sum()

    squares, total = loss(x)
    total.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * squares.sqrt())


def test_generator_works_in_compiled_code_outside_the_graph(device: torch.device) -> None:
    x = torch.full((256,), 1.0625, device=device)
    generator = torch.Generator().manual_seed(1)
    compiled = torch.compile(lambda x: qsim.quantize(x + 0, "e4m3", rounding="stochastic", generator=generator) + 0, backend="aot_eager")
    first, second = compiled(x), compiled(x)
    generator.manual_seed(1)
    eager = [qsim.quantize(x, "e4m3", rounding="stochastic", generator=generator) for _ in range(2)]
    assert torch.equal(first, eager[0])
    assert torch.equal(second, eager[1])


def test_quantizer_in_compiled_code(x: Tensor) -> None:
    spec = qsim.Quantizer(Float(4, 2), rounding=qsim.Stochastic(6))
    compiled = torch.compile(lambda x: spec(x, seed=3), fullgraph=True, backend="aot_eager")
    assert same(compiled(x), spec(x, seed=3))


def test_sizes_do_not_recompile(device: torch.device) -> None:
    counter = CompileCounter()
    compiled = torch.compile(noisy, fullgraph=True, dynamic=True, backend=counter)
    for rows, columns in ((5, 3), (7, 4), (100, 9), (1000, 2)):
        assert compiled(torch.randn(rows, columns, device=device)).shape == (rows, columns)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_dynamic_sizes_give_the_same_bits(device: torch.device) -> None:
    call = CALLS["stochastic"]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="inductor")
    for size in (5, 7, 1000):
        x = torch.randn(size, device=device)
        assert same(compiled(x), call(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["seed", "stream", "offset"])
def test_numbers_that_change_at_every_step_do_not_recompile(device: torch.device, name: str) -> None:
    # The first number may be treated as a constant, the second shows that it is not.
    x = torch.full((64,), 1.0625, device=device)
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, number: int) -> Tensor:
        numbers: dict[str, Any] = {"seed": 0, name: number}
        return qsim.quantize(x, "e4m3", rounding="stochastic", seed=Noise(**numbers))

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for number in (10, 11, 12, 1000, 2**40, 2**62):
        assert same(compiled(x, number), step(x, number))
    assert counter.frame_count <= 2


def test_seed_tensor_does_not_recompile(device: torch.device) -> None:
    x = torch.full((64,), 1.0625, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, seed: qsim.quantize(x, "e4m3", rounding="stochastic", seed=seed), fullgraph=True, backend=counter)
    for number in (10, -11, 2**62):
        assert same(compiled(x, torch.tensor(number)), qsim.quantize(x, "e4m3", rounding="stochastic", seed=number))
    assert counter.frame_count == 1
