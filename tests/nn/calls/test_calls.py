"""Products that modules compute by functions of torch: rounded at the points of the module that has the parameter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits
from support.multiplying import NEAREST, Calls, inputs, made, results, rounded
from support.points import in_order

NOISY = in_order(*[Quantizer("e2m1", "stochastic")] * 5)


def bmm(own: Any, x: Tensor) -> Tensor:
    return torch.bmm(x.expand(3, *x.shape), own.stack)


def of_each(own: Any, x: Tensor) -> Tensor:
    return torch.stack([rounded(x, matrix.mT) for matrix in own.stack])


#: Each way to multiply, and the same written out.
WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (lambda m, x: F.linear(x, m.w, m.bias), lambda m, x: rounded(x, m.w, m.bias)),
    "by keyword": (lambda m, x: F.linear(x, bias=m.bias, weight=m.w), lambda m, x: rounded(x, m.w, m.bias)),
    "@": (lambda m, x: x @ m.w.T, lambda m, x: rounded(x, m.w)),
    "weight first": (lambda m, x: m.w @ x.mT, lambda m, x: rounded(x, m.w).mT),
    "a vector": (lambda m, x: m.w.mv(x[0]), lambda m, x: rounded(x[:1], m.w)[0]),
    "a vector first": (lambda m, x: torch.matmul(x[0], m.w), lambda m, x: rounded(x[:1], m.w.mT)[0]),
    "by a vector": (lambda m, x: torch.matmul(x, m.bias), lambda m, x: rounded(x, m.bias.unsqueeze(0)).squeeze(-1)),
    "addmm": (lambda m, x: torch.addmm(m.bias, x, m.w), lambda m, x: rounded(x, m.w.mT, m.bias)),
    "addmm, scaled": (lambda m, x: torch.addmm(m.bias, x, m.w, alpha=2), lambda m, x: rounded(x, m.w.mT) * 2 + m.bias),
    "linear, by a vector": (lambda m, x: F.linear(x, m.bias), lambda m, x: rounded(x, m.bias.unsqueeze(0)).squeeze(-1)),
    "addmm, by name, to nothing": (
        lambda m, x: torch.addmm(torch.full((4,), torch.nan), mat1=x, mat2=m.w, beta=0),
        lambda m, x: rounded(x, m.w.mT),
    ),
    "baddbmm, by name": (
        lambda m, x: m.bias.expand(3, 1, 4).baddbmm(batch1=x.expand(3, *x.shape), batch2=m.stack),
        lambda m, x: of_each(m, x) + m.bias,
    ),
    "mm, by name": (lambda m, x: torch.mm(x, mat2=m.w, out=None), lambda m, x: rounded(x, m.w.mT)),
    "an expert": (lambda m, x: F.linear(x, m.stack[1]), lambda m, x: rounded(x, m.stack[1])),
    "a cast": (lambda m, x: F.linear(x.double(), m.w.double()), lambda m, x: rounded(x.double(), m.w.double())),
    "computed": (lambda m, x: x @ (m.w * m.bias).exp(), lambda m, x: rounded(x, (m.w * m.bias).exp().mT)),
    "masked": (lambda m, x: F.linear(x, m.w * m.fixed), lambda m, x: rounded(x, m.w * m.fixed)),
    "a mask first": (lambda m, x: x @ (m.fixed.T * m.w), lambda m, x: rounded(x, (m.fixed.T * m.w).mT)),
    "gathered": (lambda m, x: x @ m.stack[torch.tensor([2])][0], lambda m, x: rounded(x, m.stack[2].mT)),
    "bmm": (bmm, of_each),
    "einsum": (lambda m, x: torch.einsum("bi,eij->ebj", x, m.stack), lambda m, x: of_each(m, x)),
    "einsum, transposed": (lambda m, x: torch.einsum("ij,...j->i...", m.w, x), lambda m, x: rounded(x, m.w).mT),
    "einsum without a result": (lambda m, x: torch.einsum("ki,ij", x, m.w).mT, lambda m, x: rounded(x, m.w.mT)),
    "einsum by positions": (lambda m, x: torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2]), lambda m, x: rounded(x, m.w.mT)),
    "einsum of lists": (lambda m, x: torch.einsum("...k,kj", [x, m.w]), lambda m, x: rounded(x, m.w.mT)),
    "einsum, sizes of 1": (
        lambda m, x: torch.einsum("...bi,...ij->...bj", x.expand(2, 1, *x.shape), m.stack[None]),
        lambda m, x: torch.stack([of_each(m, x), of_each(m, x)]),
    ),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, ([-1], [0])), lambda m, x: rounded(x, m.w.mT)),
    "inner": (lambda m, x: x.inner(m.w), lambda m, x: rounded(x, m.w)),
    "conv1d": (
        lambda m, x: F.conv1d(x.T[None], m.stack[:2].mT, padding=1),
        lambda m, x: functional.conv1d(x.T[None], m.stack[:2].mT, padding=1, points=NEAREST),
    ),
    "a layer's weight": (lambda m, x: F.linear(x, m.part.weight), lambda m, x: rounded(x, m.part.weight)),
    "a table": (lambda m, x: F.linear(x, m.table.weight), lambda m, x: rounded(x, m.table.weight)),
}


@pytest.mark.parametrize("way", WAYS)
def test_products_with_parameters_are_those_of_layers(way: str) -> None:
    call, written_out = WAYS[way]
    model = made(call, part=nn.Linear(4, 4), table=nn.Embedding(7, 4))
    own, expected = (results(lambda x, of=of: of(x), model, inputs()) for of in (model, lambda x: written_out(model, x)))  # type: ignore[misc]
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(own, expected, strict=True))
    assert qsim.coverage(model, inputs()).share == 1
    plain = results(qsim.revert(model), model, inputs())
    assert not torch.allclose(own[0], plain[0], rtol=1e-3)
    assert all(map(same_bits, plain, results(lambda x: call(model, x), model, inputs())))


@pytest.mark.parametrize("points", [NEAREST, qsim.recipes.fp8_hybrid().points], ids=["plain", "scaled"])
def test_a_bias_is_added_before_the_product_is_rounded_to_16_bits(points: FivePoint) -> None:
    def transposed(m: Any, x: Tensor) -> Tensor:
        return torch.addmm(m.bias, x, m.w)

    model: Any = qsim.convert(made(transposed).bfloat16(), points)
    x = inputs(64, 4).bfloat16()
    expected = functional.linear(x, model.w.mT, model.bias, points)
    assert same_bits(model(x), expected)
    assert not same_bits(expected, functional.linear(x, model.w.mT, None, points) + model.bias)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: torch.addmm(m.bias, x, m.w),
        lambda m, x: torch.addmm(x[0], x, m.w, alpha=2),
        lambda m, x: torch.baddbmm(m.bias, x.expand(3, *x.shape), m.stack),
        lambda m, x: F.linear(x, x, m.bias.new_ones(len(x))),
    ],
    ids=["addmm", "addmm, scaled", "baddbmm", "linear of activations"],
)
def test_sums_under_autocast_have_its_dtype(call: Callable[[Any, Tensor], Tensor]) -> None:
    model = qsim.convert(made(call), NEAREST, calls="all")
    with torch.autocast("cpu", torch.bfloat16):
        assert call(made(call), inputs()).dtype == model(inputs()).dtype == torch.bfloat16


def test_modules_keep_their_own_names() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.histories = nn.Parameter(torch.randn(4, 4)), 1

        def remember(self, x: Tensor) -> Tensor:
            self.histories += 1
            return x @ self.w

        def forward(self, x: Tensor) -> Tensor:
            return self.remember(x)

    model: Any = qsim.convert(Remembering(), NEAREST)
    assert torch.allclose(model(inputs(2, 4)), rounded(inputs(2, 4), model.w.mT), rtol=1e-6, atol=1e-6)
    assert qsim.revert(model).histories == 2


# What is not rounded.


def test_activations_and_buffers() -> None:
    """Activations are rounded on request, and products with buffers, such as those of rotary embeddings, never."""

    def attends(m: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + (x @ x.mT @ x) @ m.fixed  # type: ignore[no-any-return]

    x = inputs(2, 5, 4)
    assert same_bits(made(attends)(x), attends(made(attends), x))
    model = qsim.convert(made(attends), NEAREST, calls="all")
    attention = functional.scaled_dot_product_attention(x, x, x, points=NEAREST)
    twice = functional.matmul(functional.matmul(x, x.mT, NEAREST), x, NEAREST)
    assert same_bits(model(x), attention + twice @ model.fixed)
    assert {p.reason for p in qsim.coverage(model, x).products} == {"", "not a layer: mm on the buffer fixed"}


#: Calls that are left alone, because they are no products of two matrices, or have no parameter.
LEFT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a buffer scaled by a parameter": lambda m, x: x @ (m.fixed * m.bias),
    "einsum without a sum": lambda m, x: torch.einsum("bi,ii->bi", x, m.w),
    "einsum of one operand": lambda m, x: torch.einsum("bi->b", x),
    "einsum of activations": lambda m, x: torch.einsum("bi,ci->bc", x, x * 2),
    "a bilinear form of activations": lambda m, x: F.bilinear(x, x, x[:3, :, None] * x[0]),
    "a convolution by an activation": lambda m, x: F.conv1d(x[None], x[:, :, None].mT.reshape(4, 5, 1)),
}


@pytest.mark.parametrize("way", LEFT)
def test_other_calls_are_torchs(way: str) -> None:
    model = made(LEFT[way])
    own, plain = (results(call, model, inputs()) for call in (model, lambda x: LEFT[way](model, x)))
    assert len(own) > 1
    assert all(map(same_bits, own, plain))


def test_a_convolution_by_an_activation_is_rounded_on_request() -> None:
    model = qsim.convert(made(LEFT["a convolution by an activation"]), NEAREST, calls="all")
    x = inputs()
    kernel = x[:, :, None].mT.reshape(4, 5, 1)
    points = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")
    assert same_bits(model(x), functional.conv1d(x[None], kernel, points=points))
    assert qsim.coverage(model, inputs()).share == 1


@pytest.mark.parametrize("kind", ["parameters", "all"])
def test_layers_that_are_excluded_are_so_however_they_are_called(kind: Any) -> None:
    def calls(m: Any, x: Tensor) -> Tensor:
        return F.linear(m.part(x), m.part.weight) + m.other(x)  # type: ignore[no-any-return]

    model: Any = Calls(calls, part=nn.Linear(4, 4), other=nn.Linear(4, 4))
    qsim.convert(model, NEAREST, exclude="part", calls=kind)
    x = inputs()
    assert same_bits(model(x), F.linear(model.part(x), model.part.weight) + rounded(x, model.other.weight, model.other.bias))


def test_a_head_that_is_a_layer_decides_about_its_table() -> None:
    model: Any = Calls(lambda m, x: m.head(x), table=nn.Embedding(6, 4), head=nn.Linear(4, 6, bias=False))
    model.head.weight = model.table.weight
    x = inputs()
    assert same_bits(qsim.convert(model, NEAREST, exclude="head")(x), F.linear(x, model.table.weight))
    assert same_bits(qsim.convert(model, NEAREST)(x), rounded(x, model.table.weight))


def test_recipes_keep_a_head_that_is_a_table_in_high_precision() -> None:
    def calls(m: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(m.one(m.two(x)), m.w), m.table.weight)

    recipe = qsim.recipes.Recipe("ends", NEAREST, first=0, last=1)
    model = made(calls, recipe, one=nn.Linear(4, 4), two=nn.Linear(4, 4), table=nn.Embedding(6, 4))
    found = {product.reason for product in qsim.coverage(model, inputs()).products}
    assert found == {"", "left alone: kept in high precision by the recipe ends", "not a layer: mm on the parameter table.weight"}


def test_points_by_pattern() -> None:
    model: Any = Calls(lambda m, x: F.linear(F.linear(x, m.a.w), m.b.w), a=Calls(bmm), b=Calls(bmm))
    qsim.convert(model, {"a": NEAREST, "b": FivePoint(act="e2m1", act_bwd=None)})
    x = inputs()
    assert same_bits(model(x), functional.linear(rounded(x, model.a.w), model.b.w, None, FivePoint(act="e2m1", act_bwd=None)))
    assert qsim.nn.conversion(model).calls[0] == ("a", "any products with w, stack", NEAREST)


# Noise.


def test_noise_of_weights_lasts_for_a_step_and_differs_between_parameters_and_copies() -> None:
    points = FivePoint(weight=Quantizer("e2m1", "stochastic"), weight_bwd=None)
    model = made(bmm, points, part=Calls(bmm))
    with torch.no_grad():
        model.part.w.copy_(model.w)
    model.function = lambda m, x: torch.stack([F.linear(x, own.w) for own in (m, m, m.part)])
    x = torch.eye(4)
    first, again, other = model(x)
    assert same_bits(first, again)
    assert not torch.equal(first, other)
    assert same_bits(model(x)[0], first)
    assert not torch.equal(copy.deepcopy(model)(x)[0], first)
    with torch.no_grad():
        model.w[0, 0] += 1e-3
    assert not torch.equal(model(x)[0][1:], first[1:])


# In use.


def test_copies_pickles_and_state(tmp_path: Any) -> None:
    layer: Any = qsim.convert(nn.Bilinear(2, 2, 2), NEAREST)
    keys = list(nn.Bilinear(2, 2, 2).state_dict())
    x = torch.randn(3, 2)
    for own in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert (type(own), list(own.state_dict())) == (type(layer), keys)
        assert same_bits(own(x, x), layer(x, x))
        assert type(qsim.revert(own)) is nn.Bilinear
    assert isinstance(layer, nn.Bilinear)
    assert type(layer).__qualname__ == "Bilinear"


class Borrows(nn.Module):
    """A module that multiplies by another's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.layer(F.linear(x, w)).tanh() @ w  # type: ignore[no-any-return]


def test_checkpointed_modules_repeat_their_rounding() -> None:
    """The backward pass computes the inner module again without the outer one, which has the parameter."""
    model = made(lambda m, x: m.inner(x, m.w), NOISY, inner=Borrows())
    usual = results(model, model, inputs())
    model.function = lambda m, x: checkpoint(m.inner, x, m.w, use_reentrant=False)
    assert all(map(same_bits, results(model, model, inputs()), usual))


def test_functional_calls_round_other_tensors_in_place_of_parameters() -> None:
    model, x = made(lambda m, x: F.linear(m.part(x), m.w.T), part=nn.Linear(4, 4)), inputs()
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    expected = rounded(rounded(x, others["part.weight"], others["part.bias"]), others["w"].T)
    assert same_bits(torch.func.functional_call(model, others, (x,)), expected)
    gradient = torch.func.grad(lambda w: torch.func.functional_call(model, others | {"w": w}, (x,)).sum())(others["w"])
    w = others["w"].clone().requires_grad_()
    assert same_bits(gradient, torch.autograd.grad(rounded(rounded(x, others["part.weight"], others["part.bias"]), w.T).sum(), w)[0])


@pytest.mark.parametrize("calls", ["parameters", "all"])
def test_functional_calls_round_with_the_weights_of_other_modules(calls: Any) -> None:
    """As a head does that is tied to an embedding."""
    model = qsim.convert(Calls(lambda m, x: x @ m.table.weight.T, table=nn.Embedding(6, 4)), NEAREST, calls=calls)
    x, others = inputs(), {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    assert same_bits(torch.func.functional_call(model, others, (x,)), rounded(x, others["table.weight"]))
    gradient = torch.func.grad(lambda own: torch.func.functional_call(model, own, (x,)).sum())(others)["table.weight"]
    table = others["table.weight"].clone().requires_grad_()
    assert same_bits(gradient, torch.autograd.grad(rounded(x, table).sum(), table)[0])
    each = torch.func.vmap(lambda row: torch.func.functional_call(model, others, (row,)))(x)
    assert same_bits(each, rounded(x, others["table.weight"]))
    model.table.weight = nn.Parameter(torch.randn(9, 4))  # a larger vocabulary
    others["table.weight"] = torch.randn(9, 4)
    assert same_bits(torch.func.functional_call(model, others, (x,)), rounded(x, others["table.weight"]))


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["parameters", "all"])
def test_compiled_functional_calls_round_with_the_weights_of_other_modules(calls: Any) -> None:
    model = qsim.convert(
        Calls(lambda m, x: m.part(x) @ m.table.weight.T, table=nn.Embedding(6, 4), part=nn.Linear(4, 4)), NEAREST, calls=calls
    )
    x, others = inputs(), {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    expected = rounded(rounded(x, others["part.weight"], others["part.bias"]), others["table.weight"])
    compiled = torch.compile(lambda own, x: torch.func.functional_call(model, own, (x,)), fullgraph=True, backend="eager")
    assert same_bits(compiled(others, x), expected)
    usual = torch.compile(model, fullgraph=True, backend="eager")
    assert same_bits(torch.func.functional_call(usual, {f"_orig_mod.{name}": own for name, own in others.items()}, (x,)), expected)
    assert same_bits(usual(x), model(x))


def test_an_error_leaves_no_mode_behind() -> None:
    def fails(m: Any, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = made(fails)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(inputs())
    assert torch.overrides._get_current_function_mode() is None
    x = inputs()
    assert same_bits(F.linear(x, model.w), x @ model.w.mT)


class Merged(nn.Module):
    """A layer whose weight is the sum of one and of a product of two parameters, as of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.first, self.second = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.first @ self.second)


@pytest.mark.parametrize("calls", ["parameters", "all"])
def test_weights_computed_by_a_product_of_parameters_are_weights(calls: Literal["parameters", "all"]) -> None:
    model, x = Merged(), torch.randn(4, 8)
    points = FivePoint("e4m3", "e2m1")
    product = qsim.quantize(model.first, "e4m3") @ qsim.quantize(model.second, "e2m1")
    expected = functional.linear(x, model.weight + product, points=points)
    assert torch.equal(qsim.convert(model, points, calls=calls)(x), expected)


class Steps(nn.Module):
    """Multiplies while its caller iterates, with what its caller sends."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        try:
            while True:
                sent = yield x @ self.w
                x = x if sent is None else sent
        except KeyError:
            return (2 * x) @ self.w


def test_generators_round_when_their_code_runs() -> None:
    torch.manual_seed(0)
    x, other, outside = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 4)
    model = qsim.convert(Steps(), NEAREST)
    expected = functional.linear(x, model.w.mT, None, NEAREST)
    steps = model(x)
    assert torch.equal(next(steps), expected)
    assert torch.equal(x @ model.w, x @ model.w.detach()), "code between the steps is that of the caller"
    assert not torch.equal(x @ model.w, expected)
    assert torch.equal(steps.send(other), functional.linear(other, model.w.mT, None, NEAREST))
    with pytest.raises(StopIteration) as end:
        steps.throw(KeyError())
    assert torch.equal(end.value.value, functional.linear(2 * other, model.w.mT, None, NEAREST))
    closed = model(x)
    next(closed)
    closed.close()
    assert list(closed) == []
    with pytest.raises(ValueError, match="does not fit a weight"):  # what its code raises arrives
        next(model(outside[:, :3]))
    assert torch.equal(model.w @ outside, model.w.detach() @ outside)


def test_revert_takes_a_model() -> None:
    with pytest.raises(TypeError, match=r"^revert: .*Module"):
        qsim.revert(None)  # type: ignore[type-var]
