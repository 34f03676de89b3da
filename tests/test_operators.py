"""The operators as torch sees them: opcheck, fake tensors, compile, export, vmap, autocast, gradients, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import qsim
from comparing import raw, same_bits
from qsim import rounding as roundings
from qsim.formats import E2M1, E4M3, E5M2, FP16, Float, Format, Int
from qsim_kernels.grid import spell

BACKENDS = ["aot_eager", "inductor"]
OPERATORS = torch.ops.qsim
#: A stream by name. It is hashed outside the compiled functions: a layer does so when it is made.
STREAM = qsim.random.stream("weight")
#: Values that lie between two of E4M3's and beyond its ends, a zero of either sign and a NaN.
POINTS = [0.3, -1.7, 1000.0, -500.0, 0.0, -0.0, torch.nan, 2.0**-10, 1.0625, -17.0, torch.inf, 5e-4]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def x(device: torch.device) -> Tensor:
    """Four rows of three values."""
    return torch.tensor(POINTS, device=device).view(4, 3)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in device, strides and every bit."""
    return (a.device, a.stride()) == (b.device, b.stride()) and same_bits(a, b)


def rule(rounding: str | roundings.Rounding, overflow: str = "saturate") -> str:
    """A rounding as an operator takes it."""
    return spell(roundings.rule(roundings.resolve(rounding), overflow, 32))


ARGUMENTS = [
    (E4M3, rule("nearest"), None, 0, 0),
    (E5M2, rule("odd", "nonfinite"), None, 0, 0),
    (E4M3, rule("stochastic"), 5, 0, 0),
    (Float(4, 3, specials="ieee", subnormals=False), rule(qsim.Stochastic(6, True), "nonfinite"), -1, STREAM, 2**40 + 3),
    (Int(8), rule("nearest_up"), None, 0, 0),
]
INPUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x.bfloat16()[:, 1:],
    lambda x: x.double()[0, 0],
    lambda x: x.half()[:0],
]


@pytest.fixture(params=ARGUMENTS, ids=lambda given: repr(given[0]))
def numbers(request: pytest.FixtureRequest, device: torch.device) -> tuple[Format, Tensor | None, str, tuple[int, int]]:
    """A format, a seed, a rounding, and (stream, offset)."""
    fmt, how, seed, stream, offset = request.param
    return fmt, None if seed is None else torch.tensor(seed, device=device), how, (stream, offset)


@pytest.mark.parametrize("view", INPUTS, ids=["plain", "transposed", "sliced bf16", "0-d double", "empty fp16"])
class TestOpcheck:
    @pytest.fixture
    def x(self, device: torch.device) -> Tensor:
        # No NaN: opcheck does not take one for equal to itself.
        return torch.tensor(POINTS, device=device).nan_to_num(7.0, posinf=torch.inf).view(4, 3)

    def test_quantize(self, x: Tensor, numbers: Any, view: Callable[[Tensor], Tensor]) -> None:
        fmt, seed, how, noise = numbers
        given = view(x)
        for dtype in {given.dtype, torch.float64}:
            torch.library.opcheck(OPERATORS.quantize.default, (given, seed, spell(fmt.grid), how, *noise, dtype))

    def test_quantize_in_place(self, x: Tensor, numbers: Any, view: Callable[[Tensor], Tensor]) -> None:
        fmt, seed, how, noise = numbers
        torch.library.opcheck(OPERATORS.quantize_.default, (view(x).clone(), seed, spell(fmt.grid), how, *noise))

    def test_quantize_out(self, x: Tensor, numbers: Any, view: Callable[[Tensor], Tensor]) -> None:
        fmt, seed, how, noise = numbers
        given = view(x)
        out = torch.empty_like(given, dtype=torch.float32)
        torch.library.opcheck(OPERATORS.quantize_out.default, (given, seed, spell(fmt.grid), how, *noise, out))

    def test_encode_and_decode(self, x: Tensor, numbers: Any, view: Callable[[Tensor], Tensor]) -> None:
        fmt, seed, how, noise = numbers
        given = view(x)
        for check in (True, False):
            torch.library.opcheck(OPERATORS.encode.default, (given, seed, spell(fmt.grid), how, spell(fmt.coding), *noise, check))
        codes = OPERATORS.encode(given, seed, spell(fmt.grid), how, spell(fmt.coding), *noise, True)
        for dtype in (torch.float32, torch.float64):
            torch.library.opcheck(OPERATORS.decode.default, (codes, spell(fmt.grid), spell(fmt.coding), dtype))


def test_stochastic_rounding_needs_a_seed(x: Tensor) -> None:
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        OPERATORS.quantize(x, None, spell(E4M3.grid), rule("stochastic"), 0, 0, torch.float32)
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        OPERATORS.encode(x, None, spell(E4M3.grid), rule("stochastic"), spell(E4M3.coding), 0, 0, True)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: qsim.quantize(x, "e4m3"),
    "nonfinite": lambda x: qsim.quantize(x, "e5m2", rounding="up", overflow="nonfinite"),
    "stochastic": lambda x: qsim.quantize(x, "e4m3", rounding="stochastic", seed=3, stream=STREAM, offset=1),
    "six bits": lambda x: qsim.quantize(x, "int8", rounding=qsim.Stochastic(6, correction=True), seed=-3),
    "dtype": lambda x: qsim.quantize(x, "e4m3", dtype=torch.bfloat16),
    "out": lambda x: qsim.quantize(x, "e4m3", out=torch.full_like(x, 7.0)),
    "in place": lambda x: qsim.quantize_(x.clone(), "e4m3"),
    "encode": lambda x: qsim.encode(x, "e4m3", rounding="stochastic", seed=3),
    "decode": lambda x: qsim.decode(qsim.encode(x, "e5m2"), "e5m2", dtype=torch.float16),
    "packed": lambda x: qsim.encode(x.t().contiguous(), "e2m1", packed=True, check=False),
    "threshold": lambda x: qsim.threshold_quantize(x, 0.25, 0.5),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_gives_the_same_bits(x: Tensor, name: str, backend: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for given in (x, x.t()) if name != "packed" else (x,):
        assert same(compiled(given), call(given))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_know_dtype_shape_and_strides(x: Tensor, name: str) -> None:
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x[:2].contiguous().t(),
        lambda x: torch.stack([x] * 2).transpose(0, 2)[:, ::2],
        lambda x: x[:0],
    ]
    for view in views if name != "packed" else views[:1]:
        true = CALLS[name](view(x))
        with FakeTensorMode() as mode:
            fake = CALLS[name](view(mode.from_tensor(x)))
        assert (fake.dtype, fake.device, fake.shape, fake.stride()) == (true.dtype, true.device, true.shape, true.stride())


@pytest.mark.parametrize("name", ["nearest", "stochastic", "encode", "decode"])
def test_functionalized(x: Tensor, name: str) -> None:
    # Operators that write into an argument are left out: torch.func.functionalize refuses all of them but torch's own. The compiler's
    # functionalization takes them, and opcheck and the compiled calls go through it.
    before = x.clone()
    assert same(torch.func.functionalize(CALLS[name])(x), CALLS[name](x))
    assert same(x, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_place_writes_its_argument(x: Tensor, backend: str) -> None:
    def step(weight: Tensor) -> None:
        qsim.quantize_(weight, "e4m3", rounding="stochastic", seed=1)

    whole, other = x.clone(), x.clone()
    torch.compile(step, fullgraph=True, backend=backend)(whole[:, 1:])
    step(other[:, 1:])
    assert same(whole, other)
    assert not same(whole, x)


WEIGHTS = [1.0, -2.0, 4.0, 8.0, 16.0, -32.0, 64.0]


def training(x: Tensor) -> Tensor:
    """A loss with two roundings on the way, one of which clips its gradient and changes the dtype. Everything behind them is exact."""
    inner = qsim.quantize(x * 2, "e4m3", rounding="stochastic", seed=3, clip_gradient=True, dtype=torch.bfloat16)
    coarse = qsim.quantize(inner.float() / 8, "e2m1")
    return (coarse * torch.tensor(WEIGHTS, device=x.device)).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_backward(device: torch.device, backend: str) -> None:
    values = torch.tensor([0.3, -1.7, 1000.0, -500.0, 0.01, 223.0, 225.0], device=device)
    eager, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss = training(eager)
    compiled = torch.compile(training, fullgraph=True, backend=backend)(other)
    assert torch.equal(loss, compiled)
    loss.backward()
    compiled.backward()
    assert eager.grad is not None
    assert other.grad is not None
    # 1000, -500 and 225 lie beyond 448 when doubled.
    assert other.grad.tolist() == [0.25, -0.5, 0, 0, 4, -8, 0]
    assert torch.equal(eager.grad, other.grad)


def noisy(x: Tensor) -> Tensor:
    """Stochastic rounding that draws its own seed."""
    return qsim.quantize(x, "e4m3", rounding="stochastic")


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_draw_fresh_noise(device: torch.device, backend: str) -> None:
    x = torch.full((256,), 1.0625, device=device)
    compiled = torch.compile(noisy, fullgraph=True, backend=backend)
    torch.manual_seed(4)
    first = [compiled(x) for _ in range(3)]
    assert all(not torch.equal(first[i], first[j]) for i in range(3) for j in range(i))
    torch.manual_seed(4)
    assert all(torch.equal(compiled(x), expected) for expected in first)
    torch.manual_seed(5)
    assert not torch.equal(compiled(x), first[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_draws_are_independent_within_a_graph(device: torch.device, backend: str) -> None:
    x = torch.full((256,), 1.0625, device=device)
    a, b = torch.compile(lambda x: (noisy(x), noisy(x)), fullgraph=True, backend=backend)(x)
    assert not torch.equal(a, b)


def test_compiled_checkpointing_replays_the_same_noise(device: torch.device) -> None:
    x = torch.full((256,), 1.0625, device=device, requires_grad=True)

    @torch.compile(fullgraph=True, backend="inductor")
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = torch.utils.checkpoint.checkpoint(lambda x: noisy(x).square(), x, use_reentrant=False)
        return rounded, rounded.sum()  # type: ignore[union-attr]

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


def test_dynamic_sizes_give_the_same_bits(device: torch.device) -> None:
    call = CALLS["stochastic"]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="inductor")
    for size in (5, 7, 1000):
        x = torch.randn(size, device=device)
        assert same(compiled(x), call(x))


@pytest.mark.parametrize("name", ["seed", "stream", "offset"])
def test_numbers_that_change_at_every_step_do_not_recompile(device: torch.device, name: str) -> None:
    # The first number may be taken for a constant, the second shows that it is none.
    x = torch.full((64,), 1.0625, device=device)
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, number: int) -> Tensor:
        return qsim.quantize(x, "e4m3", rounding="stochastic", **{"seed": 0, name: number})

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


class Layer(torch.nn.Module):
    """A product of quantized things, as an exported program may hold it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-2, 2, 12).view(3, 4))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        """Rounds both factors, and the codes of one of them."""
        coarse = qsim.decode(qsim.encode(x, "bf16"), "bf16")
        return qsim.quantize(coarse, "e4m3", **self.options) @ qsim.quantize(self.weight, "e2m1")


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 5, "stream": 9}], ids=["nearest", "stochastic"])
def test_export(options: dict[str, Any]) -> None:
    layer = Layer(**options).eval()
    x = torch.randn(5, 3)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"qsim.quantize.default", "qsim.encode.default", "qsim.decode.default"} <= called
    for rows in (5, 8):
        x = torch.randn(rows, 3)
        assert torch.equal(program.module()(x), layer(x))


def test_exported_program_draws_fresh_noise() -> None:
    layer = Layer(rounding="stochastic").eval()
    x = torch.full((64, 3), 1.0625)
    program = torch.export.export(layer, (x,)).module()
    assert not torch.equal(program(x), program(x))


def seeded(x: Tensor, seed: Tensor | int) -> Tensor:
    """Stochastic rounding with a seed that may be batched."""
    return qsim.quantize(x, "e4m3", rounding="stochastic", seed=seed)


class TestVmap:
    @pytest.mark.parametrize("x_dim", [0, 1, -1])
    def test_without_noise(self, x: Tensor, x_dim: int) -> None:
        for name in ("nearest", "nonfinite", "dtype", "decode"):
            batched = torch.vmap(CALLS[name], in_dims=x_dim)(x)
            assert torch.equal(raw(batched), raw(torch.stack([CALLS[name](part) for part in x.unbind(x_dim)])))

    @pytest.mark.parametrize(("x_dim", "seed_dim"), [(0, 0), (1, 0), (-1, 0), (None, 0), (0, None), (1, None), (-1, None)])
    def test_every_sample_gets_what_it_gets_alone(self, device: torch.device, x_dim: int | None, seed_dim: int | None) -> None:
        x = torch.linspace(-3, 3, 36, device=device).view(6, 6)
        seeds = torch.arange(6, device=device) - 3 if seed_dim == 0 else torch.tensor(17, device=device)
        batched = torch.vmap(seeded, in_dims=(x_dim, seed_dim))(x, seeds)
        xs = [x] * 6 if x_dim is None else x.unbind(x_dim)
        alone = [seeded(xs[i], int(seeds[i]) if seed_dim == 0 else 17) for i in range(6)]
        assert torch.equal(batched, torch.stack(alone))
        codes = torch.vmap(lambda x, s: qsim.encode(x, "e4m3", rounding="stochastic", seed=s), in_dims=(x_dim, seed_dim))(x, seeds)
        assert torch.equal(codes, torch.stack([qsim.encode(a, "e4m3") for a in alone]))

    def test_seed_given_as_a_number(self, device: torch.device) -> None:
        x = torch.linspace(-3, 3, 36, device=device).view(4, 9)
        batched = torch.vmap(lambda row: seeded(row, 17))(x)
        assert torch.equal(batched, torch.stack([seeded(row, 17) for row in x]))

    def test_nested(self, device: torch.device) -> None:
        x = torch.linspace(-3, 3, 60, device=device).view(3, 4, 5)
        seeds = torch.arange(12, device=device).view(3, 4)
        batched = torch.vmap(torch.vmap(seeded))(x, seeds)
        alone = [[seeded(x[i, j], int(seeds[i, j])) for j in range(4)] for i in range(3)]
        assert torch.equal(batched, torch.stack([torch.stack(row) for row in alone]))

    def test_empty_batch(self, device: torch.device) -> None:
        x = torch.empty(0, 5, device=device)
        assert torch.vmap(lambda row: qsim.quantize(row, "e4m3"))(x).shape == (0, 5)
        assert torch.vmap(seeded)(x, torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 5)

    def test_drawn_seeds_follow_vmaps_own_rules(self, device: torch.device) -> None:
        x = torch.full((4, 64), 1.0625, device=device)
        different = torch.vmap(noisy, randomness="different")(x)
        shared = torch.vmap(noisy, randomness="same")(x)
        assert all(not torch.equal(different[i], different[j]) for i in range(4) for j in range(i))
        assert all(torch.equal(shared[i], shared[0]) for i in range(4))
        assert not torch.equal(shared[0], different[0])
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(noisy)(x)

    def test_gradients_of_each_sample(self, device: torch.device) -> None:
        x = torch.linspace(-3, 3, 36, device=device).view(4, 9)
        seeds = torch.arange(4, device=device)
        gradients = torch.vmap(torch.func.grad(lambda x, s: seeded(x, s).square().sum()))(x, seeds)
        assert torch.equal(gradients, torch.stack([2 * seeded(x[i], i) for i in range(4)]))


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(x: Tensor, lower: torch.dtype) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = x.to(dtype)
        plain = [call(given) for name, call in CALLS.items() if name != "packed"]
        with torch.autocast(x.device.type, dtype=lower):
            within = [call(given) for name, call in CALLS.items() if name != "packed"]
        assert all(same(a, b) for a, b in zip(plain, within, strict=True))


class TestGradients:
    @pytest.mark.parametrize("rounding", list(roundings.NAMED))
    @pytest.mark.parametrize("fmt", [E4M3, E2M1, Int(4)], ids=repr)
    def test_passes_straight_through(self, x: Tensor, fmt: Format, rounding: str) -> None:
        leaf = x.clone().requires_grad_()
        upstream = torch.arange(12.0, device=x.device).view(4, 3) - 5
        qsim.quantize(leaf, fmt, rounding=rounding).backward(upstream)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, upstream)

    def test_clipped_is_that_of_clamping(self, device: torch.device) -> None:
        # At the ends themselves the gradient passes; a NaN's passes too, as clamp's does not stop it either.
        values = [448.0, -448.0, 448.1, -448.1, 464.0, torch.inf, -torch.inf, 0.0, 1.0, 447.9, 1e-30]
        leaf = torch.tensor(values, device=device, requires_grad=True)
        other = leaf.detach().clone().requires_grad_()
        upstream = torch.arange(1.0, 12.0, device=device)
        qsim.quantize(leaf, "e4m3", clip_gradient=True).backward(upstream)
        other.clamp(-448, 448).backward(upstream)
        assert leaf.grad is not None
        assert other.grad is not None
        assert torch.equal(leaf.grad, other.grad)
        assert leaf.grad.count_nonzero() == 6

    def test_clips_each_end_at_its_own_value(self, device: torch.device) -> None:
        leaf = torch.tensor([127.0, 127.5, -128.0, -128.5], device=device, requires_grad=True)
        qsim.quantize(leaf, "int8", clip_gradient=True).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [1, 0, 1, 0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_has_the_inputs_dtype(self, x: Tensor, dtype: torch.dtype) -> None:
        leaf = x.clone().requires_grad_()
        rounded = qsim.quantize(leaf, "e4m3", dtype=dtype)
        assert rounded.dtype == dtype
        upstream = torch.full_like(rounded, 1 / 3)
        rounded.backward(upstream)
        assert leaf.grad is not None
        assert same(leaf.grad, upstream.float())

    def test_finite_differences_of_the_clipped_identity(self, device: torch.device) -> None:
        # Values of the format moved by multiples of its steps stay values: there rounding is the identity, and its slope can be measured.
        x = torch.tensor([1.0, -2.5, 96.0, 3.0], dtype=torch.float64, device=device, requires_grad=True)
        call = lambda x: qsim.quantize(x, qsim.Fixed(16, 8), clip_gradient=True)  # noqa: E731
        assert torch.autograd.gradcheck(call, (x,), eps=2.0**-8, atol=0, rtol=0)
        beyond = torch.tensor([130.0, -130.0], dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(call, (beyond,), eps=2.0**-8, atol=0, rtol=0)

    def test_of_the_gradient(self, device: torch.device) -> None:
        leaf = torch.tensor([0.3, -1.7, 2.2], device=device, requires_grad=True)
        (first,) = torch.autograd.grad(qsim.quantize(leaf**3, "e4m3").sum(), leaf, create_graph=True)
        assert torch.equal(first, 3 * leaf.detach() ** 2)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        assert torch.allclose(second, 6 * leaf.detach(), rtol=1e-6)

    def test_in_functional_transforms(self, device: torch.device) -> None:
        x = torch.tensor([0.3, -1.7, 1000.0], device=device)
        loss = lambda x: qsim.quantize(x, "e4m3", clip_gradient=True).square().sum()  # noqa: E731
        expected = 2 * qsim.quantize(x, "e4m3") * torch.tensor([1.0, 1.0, 0.0], device=device)
        assert torch.equal(torch.func.grad(loss)(x), expected)
        jacobian = torch.func.jacrev(lambda x: qsim.quantize(x, "e4m3"))(x)
        assert torch.equal(jacobian, torch.eye(3, device=device))

    def test_forward_mode(self, device: torch.device) -> None:
        # The tangent passes straight through too; a silent zero would be the true derivative, which nobody wants.
        x, tangent = torch.tensor([0.3, -1.7, 1000.0], device=device), torch.tensor([1.0, 2.0, 3.0], device=device)
        value, moved = torch.func.jvp(lambda x: qsim.quantize(x, "e4m3"), (x,), (tangent,))
        assert torch.equal(value, qsim.quantize(x, "e4m3"))
        assert torch.equal(moved, tangent)
        _, clipped = torch.func.jvp(lambda x: qsim.quantize(x, "e4m3", clip_gradient=True), (x,), (tangent,))
        assert clipped.tolist() == [1, 2, 0]
        _, narrow = torch.func.jvp(lambda x: qsim.quantize(x, "e4m3", dtype=torch.bfloat16), (x,), (tangent,))
        assert same(narrow, tangent.bfloat16())

    def test_forward_over_reverse(self, device: torch.device) -> None:
        x = torch.tensor([0.5, -1.75, 2.0], device=device)
        hessian = torch.func.hessian(lambda x: (qsim.quantize(x, "e4m3") * x**2).sum())(x)
        assert torch.equal(hessian, torch.diag(6 * x))

    def test_threshold_quantize_too(self, x: Tensor) -> None:
        leaf = x.nan_to_num(0, 1, -1).requires_grad_()
        qsim.threshold_quantize(leaf, 0.25, 0.5).backward(torch.full_like(leaf, 3.0))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full_like(leaf, 3.0))

    def test_none_where_none_is_wanted(self, x: Tensor) -> None:
        assert not qsim.quantize(x, "e4m3").requires_grad
        leaf = x.clone().requires_grad_()
        with torch.no_grad():
            assert not qsim.quantize(leaf, "e4m3").requires_grad
        with torch.inference_mode():
            assert torch.equal(raw(qsim.quantize(leaf, "e4m3")), raw(qsim.quantize(x, "e4m3")))
        assert not qsim.encode(leaf, "e4m3").requires_grad

    def test_refused_where_it_would_be_lost(self, x: Tensor) -> None:
        leaf = x.clone().requires_grad_()
        with pytest.raises(ValueError, match=r"quantize_: x requires a gradient; use quantize"):
            qsim.quantize_(leaf, "e4m3")
        with pytest.raises(ValueError, match=r"out= gives no gradients"):
            qsim.quantize(leaf, "e4m3", out=torch.empty_like(x))
        with pytest.raises(ValueError, match=r"out= gives no gradients"):
            qsim.quantize(x, "e4m3", out=leaf)
        assert same(leaf.detach(), x)

    def test_in_place_write_is_seen_by_autograd(self, device: torch.device) -> None:
        # What a backward pass has kept must not change under its hands unnoticed.
        leaf = torch.tensor([1.1, 2.2], device=device, requires_grad=True)
        kept = leaf.exp()
        with torch.no_grad():
            qsim.quantize_(kept, FP16)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


@pytest.mark.gpu
class TestCudaGraphs:
    @staticmethod
    def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        call()  # compiles the kernel, which must not happen while a graph is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return graph, result

    def test_replays_draw_fresh_noise(self) -> None:
        x = torch.full((4096,), 1.0625, device="cuda")
        graph, result = self.captured(lambda: noisy(x))
        draws = []
        for _ in range(3):
            graph.replay()
            draws.append(result.clone())
        assert all(not torch.equal(draws[i], draws[j]) for i in range(3) for j in range(i))
        assert all(set(draw.unique().tolist()) == {1.0, 1.125} for draw in draws)

    def test_generator_registered_with_the_graph(self) -> None:
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

    def test_seed_tensor_is_read_at_every_replay(self) -> None:
        x = torch.full((4096,), 1.0625, device="cuda")
        seed = torch.tensor(1, device="cuda")
        graph, result = self.captured(lambda: seeded(x, seed))
        for number in (1, 2, -7, 2**62):
            seed.fill_(number)
            graph.replay()
            assert torch.equal(result, seeded(x, number))

    def test_inputs_are_read_at_every_replay(self) -> None:
        x = torch.zeros(4096, device="cuda")
        graph, result = self.captured(lambda: qsim.quantize(x, "e4m3", dtype=torch.bfloat16))
        for _ in range(2):
            x.normal_()
            graph.replay()
            assert same(result, qsim.quantize(x, "e4m3", dtype=torch.bfloat16))

    def test_encode_without_a_check(self) -> None:
        x = torch.randn(4096, device="cuda")
        graph, result = self.captured(lambda: qsim.encode(x, "e2m1", check=False))
        x.normal_()
        graph.replay()
        assert torch.equal(result, qsim.encode(x, "e2m1"))

    def test_encode_with_a_check_is_refused(self) -> None:
        x = torch.randn(4096, device="cuda")
        qsim.encode(x, "e2m1")
        torch.cuda.synchronize()
        refused = pytest.raises(RuntimeError, match="cannot be read back while a CUDA graph is captured; pass check=False")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            qsim.encode(x, "e2m1")

    def test_compiled_into_graphs(self) -> None:
        x = torch.full((4096,), 1.0625, device="cuda")
        compiled = torch.compile(noisy, fullgraph=True, mode="reduce-overhead")
        draws = [compiled(x).clone() for _ in range(5)]
        assert all(not torch.equal(draws[i], draws[j]) for i in range(5) for j in range(i))
