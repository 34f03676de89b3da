"""Every function in the registry: layers, derived classes, functions with points and functions in a converted model give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint
from qsim.nn import functional
from qsim.nn.registry import LAYERS, REGISTRY
from support.comparing import same_bits
from support.multiplying import NEAREST, results
from support.roundings import nearest

NAMES = ("fp8_hybrid", "fp8_blockwise", "hfp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8")
RECIPES = {"nearest": NEAREST, **{name: nearest(qsim.recipes.resolve(name).points) for name in NAMES}}
TOKENS, ENDS, TARGETS = torch.tensor([3, 1, 3, 0, 2, 1]), torch.tensor([2, 2, 6], dtype=torch.int32), torch.tensor([0, 4, 1, 2, 2, 7])

Call = Callable[[Any, Tensor], Tensor]
#: The same with qsim.nn.functional.
Same = Callable[[Any, Tensor, FivePoint], Tensor]


class Case(NamedTuple):
    """A call of a function of torch in a module, and the same with qsim's functions."""

    call: Call
    same: Same
    #: Whether batches of matrices have one scale: then all operands are rounded at the points of activations.
    as_activations: bool = False


class Calls(nn.Module):
    """A module that multiplies by a function of itself and its input."""

    def __init__(self, function: Call, part: nn.Module) -> None:
        super().__init__()
        self.function, self.part, self.table = function, part, nn.Embedding(5, 32)
        shapes = {"w": (64, 32), "bias": (64,), "v": (32,), "stack": (3, 64, 32), "form": (32, 32, 32)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 4))
        for dims in (1, 2, 3):
            setattr(self, f"kernel{dims}", nn.Parameter(torch.randn(32, 32, *[3] * dims) / 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def linear(x: Tensor, w: Tensor, points: FivePoint) -> Tensor:
    return functional.linear(x, w, None, points)


def in_batches(x: Tensor) -> Tensor:
    return x.expand(3, 6, 32) * torch.tensor([1.0, 2.0, 0.5]).view(3, 1, 1)


def bilinear(m: Any, x: Tensor, points: FivePoint) -> Tensor:
    matrices = linear(x, m.form.mT.flatten(0, 1), points).unflatten(-1, (32, 32))
    return functional.matmul(matrices, x.unsqueeze(-1), points).squeeze(-1)


def image(x: Tensor, dims: int) -> Tensor:
    """Two images of 32 channels."""
    pixels = torch.linspace(-1, 2, 5**dims)
    return (x[:2].unsqueeze(-1) * pixels).view(2, 32, *[5] * dims)


def convolution(name: str) -> Case:
    dims = int(name[-2])

    def call(m: Any, x: Tensor) -> Tensor:
        return getattr(F, name)(image(x, dims), getattr(m, f"kernel{dims}"), padding=1)  # type: ignore[no-any-return]

    return Case(call, lambda m, x, p: getattr(functional, name)(image(x, dims), getattr(m, f"kernel{dims}"), padding=1, points=p))


def grouped(name: str, space: Any) -> Case:
    def same(m: Any, x: Tensor, points: FivePoint) -> Tensor:
        return torch.cat([linear(rows, w, points) for rows, w in zip(x.split([2, 0, 4]), m.stack, strict=True)])

    return Case(lambda m, x: getattr(space, name)(x, m.stack.mT, offs=ENDS), same)


def summed(m: Any, x: Tensor, points: FivePoint) -> Tensor:
    """The sum of the products of all batches."""
    return linear(in_batches(x).transpose(0, 1).flatten(1), m.stack.mT.flatten(0, 1).mT, points)


def lstm(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
    i, f, g, o = (x + h).chunk(4, -1)
    return o.sigmoid() * (f.sigmoid() * c + i.sigmoid() * g.tanh()).tanh()


def gru(x: Tensor, h: Tensor, state: Tensor) -> Tensor:
    (r, z, n), (of_r, of_z, of_n) = x.chunk(3, -1), h.chunk(3, -1)
    new = (n + (r + of_r).sigmoid() * of_n).tanh()
    return new + (z + of_z).sigmoid() * (state - new)


#: The layers and the cells of recurrent functions, and one step.
RECURRENT: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "lstm": (nn.LSTM, nn.LSTMCell, lstm),
    "gru": (nn.GRU, nn.GRUCell, gru),
    "rnn_tanh": (nn.RNN, nn.RNNCell, lambda x, h, _: (x + h).tanh()),
    "rnn_relu": (
        lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
        lambda *sizes: nn.RNNCell(*sizes, nonlinearity="relu"),
        lambda x, h, _: (x + h).relu(),
    ),
}


def recurrent(name: str) -> Case:
    """One step, by the layer or by the cell."""
    is_cell, step = name.endswith("_cell"), RECURRENT[name.removesuffix("_cell")][2]
    suffix = "" if is_cell else "_l0"

    def call(m: Any, x: Tensor) -> Tensor:
        found = m.part(x) if is_cell else m.part(x.unsqueeze(0))[0].squeeze(0)
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    def same(m: Any, x: Tensor, points: FivePoint) -> Tensor:
        w_ih, w_hh, b_ih, b_hh = (getattr(m.part, f"{own}{suffix}") for own in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        zeros = x.new_zeros(x.shape[0], 32)
        return step(functional.linear(x, w_ih, b_ih, points), functional.linear(zeros, w_hh, b_hh, points), zeros)

    return Case(call, same)


PLAIN: dict[str, Call] = {
    "mm": lambda m, x: torch.mm(x, m.w.mT),
    "matmul": lambda m, x: torch.matmul(x, m.w.mT),
    "__matmul__": lambda m, x: x @ m.w.mT,
    "__rmatmul__": lambda m, x: m.w.mT.__rmatmul__(x),
    "inner": lambda m, x: x.inner(m.w),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, ([1], [1])),
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.w),
}
CASES: dict[str, Case] = {
    "linear": Case(lambda m, x: F.linear(x, m.w, m.bias), lambda m, x, p: functional.linear(x, m.w, m.bias, p)),
    **{name: Case(call, lambda m, x, p: linear(x, m.w, p)) for name, call in PLAIN.items()},
    "bmm": Case(lambda m, x: torch.bmm(in_batches(x), m.stack.mT), lambda m, x, p: functional.matmul(in_batches(x), m.stack.mT, p), True),
    "mv": Case(lambda m, x: m.w.mv(x[0]), lambda m, x, p: linear(x[:1], m.w, p)[0]),
    "dot": Case(lambda m, x: m.v.dot(x[0]), lambda m, x, p: linear(x[:1], m.v[None], p)[0, 0]),
    "vdot": Case(lambda m, x: torch.vdot(m.v, x[0]), lambda m, x, p: linear(x[:1], m.v[None], p)[0, 0]),
    "addmm": Case(lambda m, x: torch.addmm(m.bias, x, m.w.mT), lambda m, x, p: functional.linear(x, m.w, m.bias, p)),
    "addmm_": Case(lambda m, x: torch.ones(6, 64).addmm_(x, m.w.mT), lambda m, x, p: linear(x, m.w, p) + 1),
    "baddbmm": Case(
        lambda m, x: torch.baddbmm(m.bias, in_batches(x), m.stack.mT),
        lambda m, x, p: functional.matmul(in_batches(x), m.stack.mT, p) + m.bias,
        True,
    ),
    "baddbmm_": Case(
        lambda m, x: torch.ones(3, 6, 64).baddbmm_(in_batches(x), m.stack.mT),
        lambda m, x, p: functional.matmul(in_batches(x), m.stack.mT, p) + 1,
        True,
    ),
    "addbmm": Case(lambda m, x: torch.addbmm(m.bias, in_batches(x), m.stack.mT), lambda m, x, p: summed(m, x, p) + m.bias),
    "addbmm_": Case(lambda m, x: torch.ones(6, 64).addbmm_(in_batches(x), m.stack.mT), lambda m, x, p: summed(m, x, p) + 1),
    "addmv": Case(lambda m, x: torch.addmv(m.bias, m.w, x[0]), lambda m, x, p: linear(x[:1], m.w, p)[0] + m.bias),
    "addmv_": Case(lambda m, x: torch.ones(64).addmv_(m.w, x[0]), lambda m, x, p: linear(x[:1], m.w, p)[0] + 1),
    "bilinear": Case(lambda m, x: F.bilinear(x, x, m.form), bilinear),
    **{f"conv{kind}{dims}d": convolution(f"conv{kind}{dims}d") for kind in ("", "_transpose") for dims in (1, 2, 3)},
    "convolution": Case(
        lambda m, x: torch.convolution(image(x, 2), m.kernel2, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        lambda m, x, p: functional.conv2d(image(x, 2), m.kernel2, stride=2, padding=1, points=p),
    ),
    "scaled_dot_product_attention": Case(
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        lambda m, x, p: functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True, points=p),
    ),
    "embedding": Case(
        lambda m, x: F.embedding(TOKENS, m.table.weight) * x,
        lambda m, x, p: functional.embedding(TOKENS, m.table.weight, points=m.table.points) * x,
    ),
    "grouped_mm": grouped("grouped_mm", F),
    "_grouped_mm": grouped("_grouped_mm", torch),
    "linear_cross_entropy": Case(
        lambda m, x: F.linear_cross_entropy(x, m.w, TARGETS, linear_bias=m.bias),
        lambda m, x, p: F.cross_entropy(functional.linear(x, m.w, m.bias, p), TARGETS),
    ),
    **{name: recurrent(name) for kind in RECURRENT for name in (kind, f"{kind}_cell")},
}


def inputs() -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_every_function_has_a_case() -> None:
    assert {name for name, adapter in REGISTRY.items() if adapter.functions} <= CASES.keys()
    assert CASES.keys() <= REGISTRY.keys()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CASES)
def test_calls_in_a_converted_model_have_the_bits_of_functions_with_points(name: str, recipe: str) -> None:
    call, same, as_activations = CASES[name]
    points = RECIPES[recipe]
    if not REGISTRY[name].functions:
        pytest.skip(f"this torch has no {name}")
    if as_activations and (points.act, points.act_bwd) != (points.weight, points.weight_bwd):
        pytest.skip("functions without a layer round no batches of weights")
    torch.manual_seed(0)
    layer, cell, _ = RECURRENT.get(name.removesuffix("_cell"), (nn.Identity, nn.Identity, None))
    model = qsim.convert(Calls(call, (cell if name.endswith("_cell") else layer)(32, 32)), points, embeddings=True, calls="all")
    own, expected = results(model, model, inputs()), results(lambda x: same(model, x, points), model, inputs())
    assert all(map(same_bits, own, expected))
    assert qsim.coverage(model, inputs()).share == 1 if name not in ("embedding", "linear_cross_entropy") else True
    assert not same_bits(own[0], call(qsim.revert(model), inputs()))


#: Layers as torch makes them, with the input and the call of a function that give the same.
MADE: dict[type[nn.Module], tuple[tuple[Any, ...], tuple[int, ...], str]] = {
    nn.Linear: ((32, 64), (6, 32), "linear"),
    nn.Conv1d: ((32, 16, 3), (2, 32, 9), "conv1d"),
    nn.Conv2d: ((32, 16, 3), (2, 32, 6, 6), "conv2d"),
    nn.Conv3d: ((32, 16, 3), (2, 32, 4, 4, 4), "conv3d"),
    nn.ConvTranspose1d: ((32, 16, 3), (2, 32, 9), "conv_transpose1d"),
    nn.ConvTranspose2d: ((32, 16, 3), (2, 32, 6, 6), "conv_transpose2d"),
    nn.ConvTranspose3d: ((32, 16, 3), (2, 32, 4, 4, 4), "conv_transpose3d"),
}


class ByFunction(nn.Module):
    """A module that calls a function of torch on its own parameters, as a layer does."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.weight, self.bias, self.name = layer.weight, layer.bias, name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, self.name)(x, self.weight, self.bias)  # type: ignore[no-any-return]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MADE)
def test_layers_derived_classes_functions_and_calls_give_the_same_bits(kind: type[nn.Module], recipe: str) -> None:
    arguments, shape, name = MADE[kind]
    points = RECIPES[recipe]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(0)
    layer = kind(*arguments)
    derived = type("Derived", (kind,), {})(*arguments)
    derived.load_state_dict(layer.state_dict())
    calling = ByFunction(kind(*arguments), name)
    calling.load_state_dict(layer.state_dict())
    converted = [qsim.convert(module, points) for module in (layer, derived, calling)]
    assert type(layer) is getattr(qsim.nn, kind.__name__)
    assert type(derived) is not getattr(qsim.nn, kind.__name__)
    by_layer, *others = (results(module, module, x) for module in converted)
    others.append(results(lambda x: getattr(functional, name)(x, layer.weight, layer.bias, points=points), layer, x))
    for found in others:
        assert all(map(same_bits, found, by_layer))


def test_every_layer_is_compared() -> None:
    """Attention is compared in `test_attention.py`; tables are looked up in, and derived classes of them are left alone."""
    assert set(LAYERS) - {nn.MultiheadAttention, nn.Embedding} == MADE.keys()


def test_only_tables_with_points_are_looked_up_with_rounding() -> None:
    model = qsim.convert(Calls(lambda m, x: F.embedding(TOKENS, m.table.weight) * x, nn.Identity()), NEAREST)
    assert same_bits(model(inputs()), F.embedding(TOKENS, model.table.weight) * inputs())
