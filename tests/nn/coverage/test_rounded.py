"""Products that `qsim.coverage` lists as rounded, and its reasons for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint
from qsim.nn.coverage.counting import multiply_adds, operands
from qsim.nn.coverage.report import Coverage
from support.multiplying_models import ALL, MODELS, Calls, counted_by_torch, made, mlp, tokens


def reasons(found: Coverage) -> set[tuple[str, str]]:
    return {(product.module, product.reason) for product in found.products}


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
    model = qsim.convert(mlp(), {"0": ALL, "2": FivePoint(weight="e2m1", weight_bwd=None, grad="e5m2")})
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
    assert reasons(qsim.coverage(layer, (x, x, x))) == {("", "no layer with points")}
    found = qsim.coverage(qsim.convert(layer, ALL), (x, x, x))
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
    ends = qsim.recipes.Recipe("ends", ALL, first=1, last=0)
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


def test_products_that_only_a_gradient_has() -> None:
    """A triangular system is solved without a product, as in gated delta rules, and its gradient multiplies."""
    solves = Calls(lambda own, x: torch.linalg.solve_triangular(torch.eye(4) + x.tril(-1), own.up(x), upper=False), up=nn.Linear(4, 4))
    model, x = qsim.convert(solves, ALL, calls="all"), torch.randn(4, 4, requires_grad=True)
    left = {(product.direction, product.reason) for product in qsim.coverage(model, x).products if product.reason}
    assert left == {("backward", "product of two activations in the gradient of LinalgSolveTriangular")}


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "nvfp4"])
def test_both_gradients_of_a_convolution_are_products(recipe: str) -> None:
    layer = qsim.convert(nn.Conv2d(16, 32, 3), qsim.recipes.resolve(recipe).points)
    found = qsim.coverage(layer, torch.randn(2, 16, 5, 5, requires_grad=True))
    assert [tuple(point.partition("=")[0] for point in product.points) for product in found.products] == [
        ("act", "weight"), ("grad", "weight_bwd"), ("grad" if recipe == "fp8_hybrid" else "grad_w", "act_bwd"),
    ]  # fmt: skip
    assert {product.multiply_adds for product in found.products} == {2 * 32 * 16 * 9 * 9}
