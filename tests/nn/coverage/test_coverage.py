"""qsim.coverage: every product of a program, its multiply-adds as torch counts them, and whether its operands were rounded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import qsim
from qsim import FivePoint, Float, Quantizer
from qsim.nn.coverage.formulas import multiply_adds, operands
from qsim.nn.coverage.report import Coverage
from support.comparing import same_bits

ALL = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")
#: Operands of 21 bits: products run in qsim's own operators, which keep all bits of float32.
EXACT = FivePoint(*[Quantizer(Float(8, 20))] * 5)


class Calls(nn.Module):
    """A module that computes by a function."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def tied(model: Any, x: Tensor) -> Tensor:
    return F.linear(model.up(model.table(x)).tanh(), model.table.weight)


def attends(model: Any, x: Tensor) -> Tensor:
    q, k, v = model.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return model.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def tokens() -> Tensor:
    return torch.randint(10, (2, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def convolves() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Conv2d(2, 2, 3, stride=2))


def multiplies() -> nn.Module:
    return Calls(lambda own, x: torch.bmm(own.up(x), x.mT), up=nn.Linear(4, 4))


def contracts() -> nn.Module:
    return Calls(lambda own, x: torch.einsum("bij,kj->bik", x, own.up.weight), up=nn.Linear(4, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(3, 4)),
    "mlp of tokens": (mlp, lambda: torch.randn(2, 3, 4)),
    "convolutions": (convolves, lambda: torch.randn(2, 3, 6, 5)),
    "attention": (lambda: Calls(attends, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)), lambda: torch.randn(2, 5, 8)),
    "tied head": (lambda: Calls(tied, table=nn.Embedding(10, 4), up=nn.Linear(4, 4)), tokens),
    "bmm": (multiplies, lambda: torch.randn(2, 3, 4)),
    "einsum": (contracts, lambda: torch.randn(2, 3, 4)),
}


def made(name: str, points: FivePoint | None = None) -> tuple[nn.Module, Tensor]:
    """A model with points, and an input that requires a gradient if it can."""
    torch.manual_seed(0)
    model, inputs = (make() for make in MODELS[name])
    assert isinstance(model, nn.Module)
    assert isinstance(inputs, Tensor)
    if points is not None:
        qsim.convert(model, points)
    return model, inputs.requires_grad_() if inputs.is_floating_point() else inputs


def counted_by_torch(model: nn.Module, x: Tensor, backward: bool = True) -> int:
    with FlopCounterMode(display=False) as counter:
        result = model(x)
        if backward:
            result.sum().backward()
    return counter.get_total_flops() // 2


def reasons(found: Coverage) -> set[tuple[str, str]]:
    return {(product.module, product.reason) for product in found.products}


# Multiply-adds.


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("points", [None, ALL, EXACT], ids=["plain", "narrow", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_multiply_adds_are_torchs(name: str, points: FivePoint | None, backward: bool) -> None:
    model, x = made(name, points)
    with sdpa_kernel(SDPBackend.MATH):
        found = qsim.coverage(model, x, backward=backward)
        assert found.multiply_adds == counted_by_torch(made(name)[0], x, backward)
    assert {product.direction for product in found.products} == ({"forward", "backward"} if backward else {"forward"})


@pytest.mark.parametrize("points", [None, ALL, EXACT], ids=["plain", "narrow", "exact"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_multiply_within_themselves(kind: Any, points: FivePoint | None) -> None:
    """Torch counts the gradient of the weight as if there was one group, and so twice as much for two groups."""
    model, x = kind(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5, requires_grad=True)
    forward = counted_by_torch(model, x, backward=False)
    assert counted_by_torch(model, x) == (1 + 1 + 2) * forward
    if points is not None:
        qsim.convert(model, points)
    assert qsim.coverage(model, x).multiply_adds == 3 * forward


def test_products_that_torchs_counter_leaves_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    weights = 8 * 24 + 8 * 8
    fused = qsim.coverage(made("attention")[0], x)
    with sdpa_kernel(SDPBackend.MATH):
        written_out = qsim.coverage(made("attention")[0], x)
    # The fused backward pass computes the scores again.
    assert fused.multiply_adds == written_out.multiply_adds + 2 * 2 * 5 * 5 * 4
    assert written_out.multiply_adds == 3 * (2 * 5 * weights + 2 * 2 * 2 * 5 * 5 * 4)
    # A step of an LSTM multiplies its input and its state by four matrices each.
    assert qsim.coverage(nn.LSTM(8, 3), x, backward=False).multiply_adds == 2 * 5 * (4 * 3 * 8 + 4 * 3 * 3)
    assert qsim.coverage(nn.Bilinear(8, 8, 3), x, x, backward=False).multiply_adds == 2 * 5 * 8 * 8 * 3
    vector = Calls(lambda own, x: own.up.weight @ x[0, 0] @ own.up.bias, up=nn.Linear(8, 3))
    assert qsim.coverage(vector, x, backward=False).multiply_adds == 3 * 8 + 3


@pytest.mark.parametrize("shapes", [((6, 4), (3, 4, 5)), ((4, 6), (6, 5)), ((3, 6, 4), (3, 4, 5)), ((3, 6, 4), (4, 7))])
def test_grouped_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.empty(shape, device="meta") for shape in shapes)
    operator = torch.ops.aten._grouped_mm
    rows, summed, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    assert multiply_adds(operator, (a, b), {}, None) == (3 if a.dim() == b.dim() == 3 else 1) * rows * summed * columns
    assert operands(operator, (a, b, None)) == [a, b]


def test_products_with_an_accumulator() -> None:
    x, counts = torch.ones(3, 8, requires_grad=True), []
    for accumulate in (None, "h100_fp8", qsim.accumulators.Rounded("fp16", chunk=32)):
        model = qsim.convert(nn.Linear(8, 5), FivePoint("e4m3", "e4m3", "same", "same", "e5m2", accumulate=accumulate))
        found = qsim.coverage(model, x)
        counts.append((found.multiply_adds, found.share))
        by = "" if accumulate is None else "emulator"
        assert {product.by for product in found.products} == {by}
        assert str(found).count("accumulate (emulator)") == (3 if by else 0)
        assert not {product.by for product in qsim.coverage(model.to("meta"), x.to("meta")).products} - {""}
    assert counts == [(3 * 3 * 8 * 5, 1.0)] * 3


def test_products_with_a_dtype_of_their_result() -> None:
    """Layers use them on GPUs, with operands in 16 bits; torch's formula of `bmm` does not take their arguments."""
    a, b = torch.empty(3, 6, 4, device="meta"), torch.empty(3, 4, 5, device="meta")
    assert multiply_adds(torch.ops.aten.bmm, (a, b, torch.float32), {}, None) == 3 * 6 * 4 * 5
    assert multiply_adds(torch.ops.aten.addmm, (a[0], a[0], b[0], torch.float32), {}, None) == 6 * 4 * 5


def test_nothing_is_computed_without_data() -> None:
    model, x = made("convolutions", ALL)
    assert qsim.coverage(model, x) == qsim.coverage(model.to("meta"), x.to("meta"))


# Which products are rounded.


class Watching(TorchDispatchMode):
    """Adds up the multiply-adds of products all of whose operands have values of a format."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = multiply_adds(func.overloadpacket, args, kwargs or {}, result)
        if count is not None:
            self.all += count
            self.rounded += count * all(map(_is_rounded, operands(func.overloadpacket, args)))
        return result


def _is_rounded(x: Tensor) -> bool:
    return any(torch.equal(x.float(), qsim.quantize(x.float(), fmt)) for fmt in ("e4m3", "e5m2"))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_listed_as_rounded_has_rounded_values(name: str) -> None:
    model, x = made(name, ALL)
    with Watching() as watching:
        found = qsim.coverage(model, x)
    assert watching.all == found.multiply_adds
    assert round(found.share * found.multiply_adds) == watching.rounded


def test_points_are_listed_with_their_formats() -> None:
    model = qsim.convert(mlp(), {"0": ALL, "2": FivePoint(weight="e2m1", grad="e5m2")})
    found = qsim.coverage(model, torch.randn(3, 4))
    assert [(product.module, product.direction, product.points, product.reason) for product in found.products] == [
        ("0", "forward", ("act=e4m3", "weight=e4m3"), ""),
        ("2", "forward", ("weight=e2m1",), "no quantizer at act"),
        ("2", "backward", ("grad=e5m2",), "no quantizer at weight_bwd"),
        ("2", "backward", ("grad=e5m2",), "no quantizer at act_bwd"),
        ("0", "backward", ("grad=e5m2", "act_bwd=e4m3"), ""),
    ]
    assert found.products[0].shapes == ((3, 4), (4, 8))
    assert (found.multiply_adds, found.share, found.partial_share) == (3 * (2 * 4 * 8 + 3 * 8 * 2), 4 / 7, 3 / 7)


def test_attention_with_points_rounds_every_product() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    assert reasons(qsim.coverage(layer, x, x, x)) == {("", "no layer with points")}
    found = qsim.coverage(qsim.convert(layer, ALL), x, x, x)
    assert (found.share, {product.module for product in found.products}) == (1.0, {""})
    assert ("act=e4m3", "act=e4m3") in {product.points for product in found.products}


def test_reasons() -> None:
    model, x = made("tied head")
    assert ("", "not a layer: mm on the parameter table.weight") in reasons(qsim.coverage(qsim.convert(model, ALL, calls="none"), x))
    model, x = made("bmm", ALL)
    assert ("", "product of two activations") in reasons(qsim.coverage(model, x))
    model = qsim.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), "nvfp4", exclude="2")
    found = reasons(qsim.coverage(model, torch.randn(16, 4)))
    assert ("2", "left alone: not chosen") in found
    qsim.revert(model)
    assert reasons(qsim.coverage(model, torch.randn(2, 4))) == {(str(i), "no layer with points") for i in range(3)}
    ends = qsim.Recipe("ends", ALL, first=1, last=0)
    found = reasons(qsim.coverage(qsim.convert(model, ends), torch.randn(2, 4)))
    assert found == {("0", "left alone: kept in high precision by the recipe ends"), ("1", ""), ("2", "")}


def test_operands_computed_from_parameters_are_named() -> None:
    """Under autocast, and with parametrized weights, products read copies; buffers have names, too; a lookup is an activation."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.table = nn.Parameter(torch.randn(4, 4)), nn.Embedding(10, 4)
            self.register_buffer("fixed", torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.table(x)
            return x @ (self.weight.exp() * 2) @ self.fixed @ x.mT  # type: ignore[no-any-return]

    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
            found = reasons(qsim.coverage(Odd(), tokens()))
        names = {reason.partition(" on ")[2] or reason for _, reason in found}
        assert names == {"the parameter weight", "the buffer fixed", "product of two activations"}


def test_calls_that_do_not_differ_are_counted_together() -> None:
    layer = nn.Linear(4, 4)
    model = qsim.convert(nn.Sequential(layer, layer, layer), ALL)
    found = qsim.coverage(model, torch.randn(3, 4, requires_grad=True))
    assert [(product.module, product.calls, product.multiply_adds) for product in found.products] == [("0", 3, 144)] * 3


def test_checkpointed_modules_are_computed_twice() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
            super().__init__()
            self.inner, self.last, self.call = mlp(), nn.Linear(2, 2), call

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.call(self, x))  # type: ignore[no-any-return]

    def of_a_function(own: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.linear(own.inner(x), own.last.weight), x, use_reentrant=False)  # type: ignore[no-any-return]

    def of_a_module(own: Any, x: Tensor) -> Tensor:
        return checkpoint(own.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    for call in (of_a_function, of_a_module):
        model = qsim.convert(Checkpointed(call), ALL, include="inner")
        found = qsim.coverage(model, torch.randn(3, 4))
        calls = [(p.module, p.calls) for p in found.products if p.direction == "forward" and p.module.startswith("inner")]
        assert calls == [("inner.0", 2), ("inner.2", 2)]
        # Torch ends the second computation once it has what the backward pass needs, without the last product of plain layers.
        plain = qsim.coverage(Checkpointed(call), torch.randn(3, 4))
        assert plain.multiply_adds == counted_by_torch(Checkpointed(call), torch.randn(3, 4)) <= found.multiply_adds
        assert all(p.reason for p in found.products if not p.module.startswith("inner"))
        assert all(not p.reason for p in found.products if p.module.startswith("inner"))


def test_gradients_within_the_forward_pass() -> None:
    """As in models of forces: the gradient is differentiated again."""

    def force(own: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(own.inner(x).sum(), x, create_graph=True)[0]

    found = qsim.coverage(Calls(force, inner=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))), torch.randn(3, 4))
    assert reasons(found) == {("inner.0", "no layer with points"), ("inner.2", "no layer with points")}
    assert [product.direction for product in found.products[:3]] == ["forward", "forward", "backward"]


def test_layers_that_never_run() -> None:
    class Around(nn.Module):
        """Reads the weight of one layer without calling it, as Mamba and Swin do, and never uses another."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.read, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.used(x), self.read.weight)

    model = qsim.convert(Around(), ALL, exclude="idle", calls="none")
    found = qsim.coverage(model, torch.randn(2, 4))
    assert found.never_called == ("read",)
    assert ("", "not a layer: mm on the parameter read.weight") in reasons(found)
    assert str(found).splitlines()[-1] == "never called: read"
    assert qsim.coverage(qsim.revert(model), torch.randn(2, 4)).never_called == ()
    found = qsim.coverage(qsim.convert(model, ALL), torch.randn(2, 4))
    assert (found.never_called, found.share) == (("idle",), 1.0)


def test_output_in_inference_mode_is_the_same() -> None:
    model, x = made("attention", ALL)
    with sdpa_kernel(SDPBackend.MATH):
        usual = qsim.coverage(model, x, backward=False)
        with torch.inference_mode():
            assert qsim.coverage(model, x.detach(), backward=False).multiply_adds == usual.multiply_adds


def test_operators_of_other_packages_are_named() -> None:
    with torch.library._scoped_library("coverage_of_others", "DEF") as library:
        library.define("times(Tensor a, Tensor b) -> Tensor")
        library.impl("times", torch.matmul, "CompositeExplicitAutograd")
        model = Calls(lambda own, x: own.up(torch.ops.coverage_of_others.times(x, x)), up=nn.Linear(4, 4))
        found = qsim.coverage(model, torch.randn(4, 4))
        assert found.opaque == ("coverage_of_others::times",)
        assert str(found).endswith("operators that may multiply inside, not counted: coverage_of_others::times")
        opaque = Calls(lambda own, x: torch.ops.coverage_of_others.times(x, x))
        with pytest.raises(ValueError, match="multiplies nothing with these inputs; operators that may multiply inside: coverage_of_oth"):
            qsim.coverage(opaque, torch.randn(4, 4), backward=False)


# The result.


def test_plain_values_and_a_table() -> None:
    model, x = made("mlp", ALL)
    found = qsim.coverage(model, x)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["share"], plain["multiply_adds"], len(plain["products"])) == (1.0, found.multiply_adds, len(found.products))
    assert plain["products"][0] == {
        "module": "0",
        "direction": "forward",
        "operator": "addmm",
        "shapes": [[3, 4], [4, 8]],
        "calls": 1,
        "multiply_adds": 96,
        "points": ["act=e4m3", "weight=e4m3"],
        "reason": "",
        "by": "",
    }
    lines = str(found).splitlines()
    assert lines[0] == "432 multiply-adds; both operands rounded: 100 %, one of them: 0 %"
    assert lines[1].split() == ["module", "pass", "operator", "operands", "calls", "multiply-adds", "rounded", "at"]
    assert len(lines) == 2 + len(found.products)
    assert found.table() == str(found)
    assert "(the model)" in str(qsim.coverage(nn.Linear(2, 2), torch.randn(1, 2)))


@pytest.mark.parametrize("kind", ["loss", "dictionary", "tuple"])
def test_gradients_are_of_the_loss_or_of_all_outputs(kind: str) -> None:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            one, other = self.first(x), self.second(x)
            if kind == "tuple":
                return one, [other, other.argmax()], "text"
            return {"loss" if kind == "loss" else "one": one.mean(), "other": other}

    found = qsim.coverage(Outputs(), torch.randn(3, 4))
    backward = {product.module for product in found.products if product.direction == "backward"}
    assert backward == ({"first"} if kind == "loss" else {"first", "second"})


# No trace.


class Stateful(nn.Module):
    """Batch norm, dropout, delayed scales, stochastic rounding and a buffer that the forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.head(self.drop(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def stateful() -> nn.Module:
    torch.manual_seed(0)
    noisy = Quantizer("e5m2", "stochastic", scale=qsim.scaling.Delayed(4))
    return qsim.convert(Stateful(), FivePoint(act=Quantizer("e4m3", scale=qsim.scaling.Delayed(4)), weight="e4m3", grad=noisy))


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    hooks = [dict(value) for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")]
    return [torch.get_rng_state(), *[x.detach().clone() for x in tensors], list(map(id, tensors)), gradients, hooks]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model, x = stateful(), torch.randn(2, 2, 5, 5, requires_grad=True)
    model(x).sum().backward()
    before, gradient = state(model), x.grad
    assert gradient is not None
    kept, global_hooks = gradient.clone(), _global_hooks()
    if fails:
        with pytest.raises(RuntimeError, match="expected"):
            qsim.coverage(model, x[:, :1])
    else:
        assert qsim.coverage(model, x).share > 0
    for one, other in zip(before, state(model), strict=True):
        assert same_bits(one, other) if isinstance(one, Tensor) else one == other
    assert x.grad is gradient
    assert torch.equal(gradient, kept)
    assert not x._backward_hooks
    assert _global_hooks() == global_hooks
    assert qsim.nn.product.observers.current() is None


def _global_hooks() -> list[int]:
    names = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called", "_global_backward_hooks")
    return [len(getattr(nn.modules.module, name)) for name in names]


def test_training_goes_on_with_the_same_bits() -> None:
    results = []
    for looks in (False, True):
        model = stateful()
        for _ in range(2):
            x = torch.randn(2, 2, 5, 5)
            if looks:
                qsim.coverage(model, x)
            model(x).sum().backward()
        results.append([*[p.grad for p in model.parameters()], *model.buffers()])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert same_bits(one, other)


def test_a_monitor_does_not_count_it() -> None:
    model = qsim.convert(mlp(), ALL)
    with qsim.diagnostics.Monitor(model) as monitor:
        assert qsim.coverage(model, torch.randn(3, 4)).share == 1.0
        model(torch.randn(5, 4)).sum().backward()
        monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 20


# convert(…, example=…)


def test_converting_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    line = "336 multiply-adds; both operands rounded: 42.86 %, one of them: 0 %"
    for example in (torch.randn(3, 4), (torch.randn(3, 4),), {"input": torch.randn(3, 4)}):
        qsim.convert(mlp(), ALL, exclude="0", verbose=True, example=example)
        assert capsys.readouterr().out.splitlines()[-1] == line
    assert isinstance(qsim.convert(mlp().requires_grad_(False), ALL, example=torch.randn(3, 4)), nn.Module)
    assert not capsys.readouterr().out
    model = Calls(lambda own, x: own.one(x), one=nn.Linear(4, 4), other=nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="convert: the model never called these layers with the example, so they round nothing: other"):
        qsim.convert(model, ALL, example=torch.randn(3, 4))


# Errors.


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"coverage: model must be a torch.nn.Module, got 3"):
        qsim.coverage(3)  # type: ignore[arg-type]
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"coverage: the model multiplies nothing with these inputs$"):
        qsim.coverage(nn.ReLU(), x, backward=False)
    with pytest.raises(ValueError, match="coverage: no output requires a gradient: give backward=False"):
        qsim.coverage(mlp().requires_grad_(False), x)
    with pytest.raises(ValueError, match="coverage: its module '1' is lazy and has seen no input: call the model once before"):
        qsim.coverage(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)), x)
    model = mlp()
    with pytest.raises(ValueError, match="coverage: the model is compiled, and compiled code does not report its products"):
        qsim.coverage(torch.compile(model), x)  # type: ignore[arg-type]
    model[0].compile()  # type: ignore[index]
    with pytest.raises(ValueError, match="coverage: its module '0' is compiled"):
        qsim.coverage(model, x)


# Models of other packages.


def _gpt2(transformers: Any) -> tuple[Any, Any]:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8, bos_token_id=0, eos_token_id=0)
    return config, transformers.GPT2LMHeadModel


def _bert(transformers: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.BertConfig(**sizes), transformers.BertForMaskedLM


def _llama(transformers: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.LlamaConfig(**sizes, num_key_value_heads=1), transformers.LlamaForCausalLM


def _mixtral(transformers: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=3), transformers.MixtralForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_gpt2, _bert, _llama, _mixtral])
def test_models_of_transformers(kind: Callable[[Any], tuple[Any, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    config, cls = kind(transformers)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model, ids = cls(config), torch.randint(20, (2, 6))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    qsim.convert(model, ALL)
    found = qsim.coverage(model, input_ids=ids, labels=ids)
    assert found.multiply_adds == counter.get_total_flops() // 2
    assert found.never_called == ()
    left = {product.reason for product in found.products} - {""}
    on_parameters = {reason.rpartition(".")[2] for reason in left if reason.startswith("not a layer") and "parameter" in reason}
    assert on_parameters == set()
    assert found.share > 0.85
    assert "product of two activations" in left
    assert math.isclose(sum(p.multiply_adds for p in found.products if not p.reason) / found.multiply_adds, found.share)
