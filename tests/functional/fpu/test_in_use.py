"""`qsim.fpu` combined with other features: exclusions, nesting, optimizers, random bits, qsim's layers, threads, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint
from qsim.formats import Float
from qsim.random import Noise
from support.comparing import is_in, same_bits

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

X = torch.tensor([[0.1, -0.7, 3.3], [1e-3, 5.05, -0.01]])


LEFT_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(6),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[:, 1:],
    "expand": lambda x: x[0].expand(4, 3),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "copy_": lambda x: torch.empty(2, 3).copy_(x),
    "to another dtype and back": lambda x: x.double().float(),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "index": lambda x: x[torch.tensor([1, 0])],
    "gather": lambda x: x.gather(1, torch.tensor([[2], [0]])),
    "put into places": lambda x: torch.zeros(2, 3).index_put_((torch.tensor([1, 0]),), x),
    "set a row": lambda x: _with_row(x),
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort().values,
    "topk": lambda x: x.topk(2).values,
    "max": lambda x: x.max(1).values,
    "where": lambda x: torch.where(x > 0, x, x),
    "embedding": lambda x: F.embedding(torch.tensor([1, 1, 0]), x),
    "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "compare": lambda x: (x > 0.1).int(),
    "argmax": lambda x: x.argmax(),
    "integers": lambda x: (x * 1000).long().detach() * 0 + 257,
    "bring in": lambda x: torch.tensor(x.tolist()),
}  # fmt: skip


def _with_row(x: Tensor) -> Tensor:
    new = torch.zeros(2, 3)
    new[1] = x[0]
    return new


@pytest.mark.parametrize("name", list(LEFT_ALONE))
def test_leaves_alone(name: str) -> None:
    with qsim.fpu("e4m3"):
        found = LEFT_ALONE[name](X)
    assert same_bits(found, LEFT_ALONE[name](X))


def test_views_stay_views_and_what_is_written_in_place_is_rounded() -> None:
    x = X.clone()
    with qsim.fpu("bf16"):
        row = x[0]
        row.add_(0.3)
        total = torch.add(x[1], 0.3, out=torch.empty(3))
        (first,) = torch._foreach_mul([X], 0.3)
        torch._foreach_mul_([total], 2.0)
    assert row.data_ptr() == x.data_ptr()
    assert same_bits(x[0], qsim.quantize(X[0] + 0.3, "bf16"))
    assert same_bits(x[1], X[1])  # unwritten elements are unchanged
    assert same_bits(total, 2 * qsim.quantize(X[1] + 0.3, "bf16"))
    assert same_bits(first, qsim.quantize(X * 0.3, "bf16"))


def test_numbers_that_are_made_are_rounded() -> None:
    made: list[Callable[[], Tensor]] = [
        lambda: torch.randn(50),
        lambda: torch.rand(50),
        lambda: torch.full((3,), 0.1),
        lambda: torch.empty(50).normal_(),
        lambda: nn.Linear(5, 5).weight,
        lambda: torch.linspace(0, 1, 7),
        lambda: X.masked_fill(X > 1, 0.3),
    ]
    for make in made:
        torch.manual_seed(0)
        plain = make().detach()
        torch.manual_seed(0)
        with qsim.fpu("bf16"):
            found = make().detach()
        assert same_bits(found, qsim.quantize(plain, "bf16"))
        assert not same_bits(found, plain)


def test_gradients_that_add_up_are_rounded() -> None:
    w = torch.ones(3, requires_grad=True)
    with qsim.fpu("bf16"):
        for _ in range(3):
            (w * torch.tensor([1.0, 1.0078125, 100.5])).sum().backward()
    # The third sum of 1.0078125 is 3.0234375, which is between 3.015625 and 3.03125.
    assert w.grad is not None
    assert w.grad.tolist() == [3.0, 3.03125, 302.0]


def test_the_innermost_context_holds() -> None:
    unit = qsim.fpu("e4m3")
    with unit:
        coarse = X * 1.1
        with qsim.fpu("bf16"):
            fine = X * 1.1
            with unit, qsim.fpu(None):
                exact, loss = X * 1.1, F.l1_loss(X, 1.1 * X)
        with unit:
            again = X * 1.1
        last = X * 1.1
    after = X * 1.1
    assert same_bits(exact, after)
    assert same_bits(loss, F.l1_loss(X, 1.1 * X))
    assert same_bits(fine, qsim.quantize(after, "bf16"))
    assert all(same_bits(x, qsim.quantize(after, "e4m3")) for x in (coarse, again, last))


def test_an_exception_ends_it_and_it_may_be_a_decorator() -> None:
    unit = qsim.fpu("bf16")
    with pytest.raises(RuntimeError, match="mat1 and mat2"), unit:
        torch.mm(X, X)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), unit:
        F.cross_entropy(X, torch.mm(X, X))
    assert same_bits(X * 1.1, torch.mul(X, 1.1))
    assert not is_in(X * 1.1, "bf16")

    @unit
    def scaled(x: Tensor, depth: int) -> Tensor:
        return scaled(x, depth - 1) if depth else x * 1.1

    assert same_bits(scaled(X, 3), qsim.quantize(X * 1.1, "bf16"))
    assert not is_in(X * 1.1, "bf16")


def test_other_threads_are_not_concerned() -> None:
    found: list[Tensor] = []
    with qsim.fpu("bf16"):
        thread = threading.Thread(target=lambda: found.append(X * 1.1))
        thread.start()
        thread.join()
        mine = X * 1.1
    assert not is_in(found[0], "bf16")
    assert is_in(mine, "bf16")


@pytest.mark.gpu
def test_the_threads_of_a_backward_pass_round() -> None:
    x = torch.randn(64, 64, device="cuda").bfloat16().float().requires_grad_()
    with qsim.fpu("bf16"):
        F.cross_entropy(torch.sin(x) @ x, torch.arange(64, device="cuda")).backward()
    assert x.grad is not None
    assert is_in(x.grad, "bf16")
    assert x.grad.abs().sum() > 0


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_torchs_optimizers_count_their_steps_and_round_the_rest(kind: type, options: dict[str, Any]) -> None:
    p = nn.Parameter(qsim.quantize(torch.randn(5), "bf16"))
    optimizer = kind([p], lr=0.01, **options)
    with qsim.fpu("bf16"):
        for _ in range(300):
            p.grad = torch.randn(5)
            optimizer.step()
    state = optimizer.state[p]
    assert state.get("step", torch.tensor(300.0)).item() == 300
    kept = [p, *(x for x in state.values() if isinstance(x, Tensor) and x.dim())]
    assert all(is_in(x, "bf16") for x in kept)


def test_weights_that_stay_in_float32_are_an_experiment_of_its_own() -> None:
    """Section 3.1 of the paper: small updates are lost in bfloat16 and kept if the weight's subtraction is not rounded."""
    lost, held = torch.ones(4), torch.ones(4)
    with qsim.fpu("bf16"):
        for _ in range(100):
            change = torch.full((4,), 2.0**-12)
            lost -= change
            with qsim.fpu(None):
                held -= change
    assert torch.equal(lost, torch.ones(4))
    assert torch.equal(held, torch.full((4,), 1 - 100 * 2.0**-12))


def test_random_bits() -> None:
    x = torch.full((4096,), 1.0)

    def draw(**source: Any) -> tuple[Tensor, Tensor]:
        with qsim.fpu("bf16", "stochastic", **source):
            return x + 2.0**-9, x + 2.0**-9

    torch.manual_seed(4)
    first, second = draw()
    torch.manual_seed(4)
    assert same_bits(draw()[0], first)
    torch.manual_seed(5)
    assert not same_bits(draw()[0], first)
    for source in ({"seed": 3}, {"seed": Noise(3, 9)}, {"generator": torch.Generator().manual_seed(1)}):
        one, two = draw(**source)
        assert not same_bits(one, two)
    assert same_bits(draw(seed=3)[0], qsim.quantize(x + 2.0**-9, "bf16", rounding="stochastic", seed=3))
    assert not same_bits(first, second)
    # 4096 draws of probability 1/4, and Hoeffding's inequality: 2 * exp(-2 * 4096 * 0.045**2) is 1.2e-7 for each sample.
    for sample in (first, second):
        assert abs((sample > 1).double().mean().item() - 0.25) < 0.045
    state = torch.get_rng_state()
    with qsim.fpu("bf16"):
        X * 1.1
    assert torch.equal(state, torch.get_rng_state())  # rounding to nearest draws nothing


@pytest.mark.parametrize(
    "points", [FivePoint("e4m3", "e4m3", grad="e5m2", act_bwd=None, weight_bwd=None), qsim.recipes.nvfp4().points], ids=["plain", "nvfp4"]
)
def test_layers_with_points_are_one_operator(points: FivePoint) -> None:
    layer = qsim.nn.Linear(32, 16, points=points)
    x = torch.randn(16, 32, requires_grad=True)
    upstream = qsim.quantize(torch.randn(16, 16), "bf16")

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]

    exact = run()
    with qsim.fpu("bf16"):
        found = run()
    for due, one in zip(exact, found, strict=True):
        assert not is_in(due, "bf16")
        assert same_bits(one, qsim.quantize(due, "bf16"))


QSIMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(fmt): lambda x, fmt=fmt: qsim.quantize(x, fmt) for fmt in ("e4m3", "mxfp4", "nvfp4", Float(7, 15))},
    "scale": lambda x: qsim.quantize(x, "e4m3", scale=qsim.scaling.PerTensor()),
    "transform": lambda x: qsim.Quantizer("e4m3", transform="Hadamard(16)")(x),
    "codes": lambda x: qsim.decode(qsim.encode(x, "mxfp4"), "mxfp4"),
    "in place": lambda x: qsim.quantize_(x.clone(), Float(7, 15)),
    "threshold_quantize": lambda x: qsim.functional.threshold_quantize(x, 0.3, 0.2),
}


@pytest.mark.parametrize("name", list(QSIMS))
def test_qsims_operators_say_themselves_what_they_round(name: str) -> None:
    x = torch.randn(4, 32)
    with qsim.fpu("e3m1"):
        found = QSIMS[name](x)
    assert same_bits(found, QSIMS[name](x))


def test_qsims_optimizers_do_too() -> None:
    moved = []
    for unit in (qsim.fpu(None), qsim.fpu("e4m3")):
        p = nn.Parameter(torch.linspace(-1, 1, 9))
        optimizer = qsim.optim.AdamW([p], lr=0.1, format="bf16", seed=2)
        with unit:
            for _ in range(3):
                p.grad = torch.linspace(1, 2, 9)
                optimizer.step()
        moved.append(p.detach())
    assert same_bits(*moved)


def test_float64_complex_and_inference() -> None:
    x, z = X.double(), torch.complex(X, X.flip(0))
    with qsim.fpu("bf16"), torch.inference_mode():
        wide, product, y = x * x, z.conj() * z, torch.ones(3)
        y.mul_(1.1)
    assert same_bits(wide, qsim.quantize(x * x, "bf16"))
    assert same_bits(torch.view_as_real(product), qsim.quantize(torch.view_as_real(z.conj() * z), "bf16"))
    assert y.tolist() == [1.1015625] * 3


def test_overflow_follows_the_format_by_default() -> None:
    x = torch.tensor([3e38, -3e38]) * 1.0
    for fmt, overflow, due in (("bf16", "format", torch.inf), ("bf16", "saturate", 3.3895313892515355e38), ("e4m3", "format", 448.0)):
        with qsim.fpu(fmt, overflow=overflow):
            assert (x * 2).tolist() == [due, -due]


def test_batch_norm_in_evaluation_writes_nothing() -> None:
    norm = nn.BatchNorm1d(3).eval()
    norm.running_mean.fill_(0.1)
    with qsim.fpu("bf16"):
        norm(X)
    assert same_bits(norm.running_mean, torch.full((3,), 0.1))


def test_compiled_functions_run_operator_by_operator() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 1.1).sin() + 0.1

    compiled = torch.compile(function, backend="eager")
    with qsim.fpu("bf16"):
        assert same_bits(compiled(X), function(X))

    def with_context(x: Tensor) -> Tensor:
        with qsim.fpu("bf16"):
            return function(x)

    assert same_bits(torch.compile(with_context, backend="eager")(X), with_context(X))


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"format": "bf61"}, ValueError, "did you mean 'bf16'"),
    ({"format": "mxfp4"}, ValueError, "must not have scales, got 'mxfp4'"),
    ({"format": "e8m0"}, ValueError, "needs zero and negative numbers, which PowerOfTwo"),
    ({"format": "uint8"}, ValueError, "needs zero and negative numbers"),
    ({"format": "bf16", "rounding": "near"}, ValueError, "did you mean 'nearest'"),
    ({"format": "bf16", "overflow": "wrap"}, ValueError, "overflow must be 'saturate', .* or 'format', got 'wrap'"),
    ({"format": "bf16", "keep": "softmx"}, ValueError, "none is called 'softmx'; did you mean 'softmax'"),
    ({"format": "bf16", "keep": [nn.LayerNorm]}, ValueError, "did you mean 'layer_norm'"),
    ({"format": "bf16", "keep": [lambda x: x]}, ValueError, "such as torch.nn.functional.softmax, got"),
    ({"format": "bf16", "keep": 5}, TypeError, "keep must be names of torch's functions, or these functions, got 5"),
    ({"format": "bf16", "keep": [5]}, TypeError, "keep must be names of torch's functions, or these functions, got 5"),
    ({"format": "bf16", "seed": 1, "generator": torch.Generator()}, ValueError, "give seed= or generator=, not both"),
    ({"format": "bf16", "seed": 0.5}, TypeError, "seed must be an int"),
    ({"format": "bf16", "seed": Noise(0, 2**70)}, ValueError, "stream must fit 64 signed bits"),
    ({"format": "bf16", "seed": Noise(0, 0, 3)}, ValueError, "first element has the index 0, got an offset of 3"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), ERRORS)
def test_refuses(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        qsim.fpu(**arguments)


FP8 = torch.float8_e4m3fn
HALF = torch.ones(3, dtype=torch.bfloat16)
IN_CONTEXT: list[tuple[qsim.fpu, Callable[[], Tensor], str]] = [
    (qsim.fpu(Float(6, 5)), lambda: HALF + 1, "bfloat16 rounds by itself, and .* after it would be a second rounding"),
    (qsim.fpu("fp16"), lambda: HALF * HALF, "bfloat16, which cannot hold every value of"),
    (qsim.fpu("bf16", "stochastic"), lambda: HALF + 1, "operators on bfloat16 round to nearest by themselves"),
    (qsim.fpu("fp32", "stochastic"), lambda: X + 1, "operators on float32 round to nearest by themselves"),
    (qsim.fpu("bf16"), lambda: (X * 1).to_sparse() * 2, "must return dense tensors, got layout torch.sparse_coo"),
    (qsim.fpu("bf16"), lambda: torch.full((2,), 1.0, dtype=FP8), "must return float32 or float64, or .* itself, got float8_e4m3fn"),
    (qsim.fpu("bf16"), lambda: torch.func.grad(lambda x: F.l1_loss(x, x * 2))(X), "l1_loss rounds once, which does not work under"),
]  # fmt: skip


@pytest.mark.parametrize(("unit", "function", "words"), IN_CONTEXT)
def test_refuses_in_the_context(unit: qsim.fpu, function: Callable[[], Tensor], words: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=words), unit:
        function()


def test_refuses_before_anything_is_written() -> None:
    x = HALF.clone()
    with pytest.raises(ValueError, match="second rounding"), qsim.fpu(Float(6, 5)):
        x.add_(1)
    assert torch.equal(x, HALF)


def test_bfloat16_tensors_stay_as_torch_has_them() -> None:
    with qsim.fpu("bf16"):
        assert same_bits(X.bfloat16() * 1.1, X.bfloat16().mul(1.1))


def test_store_and_repr() -> None:
    unit = qsim.fpu(Float(6, 5), keep=["softmax", "layer_norm"])
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = model[0].weight.detach().clone()
    assert unit.store(model) is model
    assert same_bits(model[0].weight, qsim.quantize(before, Float(6, 5)))
    assert model[0].weight.requires_grad
    assert same_bits(qsim.fpu(Float(6, 5), "stochastic").store(before.clone()), model[0].weight)
    assert repr(unit) == "fpu(Float(6, 5), rounding=NEAREST, keep=['layer_norm', 'softmax'], overflow='saturate')"
    assert qsim.fpu(None).store(before) is before
    with pytest.raises(TypeError, match="store takes a tensor or a module, got list"):
        unit.store([before])  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"fpu: this decorates functions, got a Tensor; use store\(x\) to convert numbers to the format"):
        unit(before)
