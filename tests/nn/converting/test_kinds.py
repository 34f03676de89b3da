"""qsim.convert on special parts of models: shared, tied, parametrized, pruned, lazy, derived and foreign modules."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="e4m3", weight_bwd="same", grad="e5m2")


def left(model: nn.Module) -> dict[str, str]:
    """The modules left alone, with reasons."""
    return dict(qsim.nn.conversion(model).left)


def rounded(layer: Any, x: Tensor) -> Tensor:
    """The result of a linear layer with points."""
    return functional.linear(x, layer.weight, layer.bias, NEAREST)


# Shared parameters and modules.


class Tied(nn.Module):
    """A table whose transpose is the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("embeddings", [False, True])
def test_tied_weights_stay_tied(embeddings: bool) -> None:
    model, x = Tied(), torch.tensor([[1, 2]])
    qsim.convert(model, NEAREST, embeddings=embeddings)
    assert model.head.weight is model.table.weight
    assert len(list(model.parameters())) == 1
    model(x).square().sum().backward()
    table = model.table.weight.detach().clone().requires_grad_()
    seen = functional.embedding(x, table, points=NEAREST) if embeddings else nn.functional.embedding(x, table)
    functional.linear(seen, table, points=NEAREST).square().sum().backward()
    assert table.grad is not None
    assert model.table.weight.grad is not None
    assert same_bits(model.table.weight.grad, table.grad)
    assert qsim.revert(model).head.weight is model.table.weight


class Shared(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.decoder = nn.Sequential(self.encoder[0], nn.Linear(4, 4))


@pytest.mark.parametrize("include", [None, ["encoder"], ["decoder"], ["decoder.0"]])
def test_a_shared_module_is_known_by_all_of_its_names(include: Any) -> None:
    model = qsim.convert(Shared(), NEAREST, include)
    assert model.encoder[0] is model.decoder[0]
    assert type(model.decoder[0]) is qsim.nn.Linear
    assert type(model.decoder[1]) is (nn.Linear if include in (["encoder"], ["decoder.0"]) else qsim.nn.Linear)
    assert ("encoder.0, decoder.0", "Linear", NEAREST) in qsim.nn.conversion(model).changed
    assert type(qsim.revert(model).decoder[0]) is nn.Linear


def test_a_shared_module_is_left_alone_if_one_of_its_names_is_excluded() -> None:
    model = qsim.convert(Shared(), NEAREST, exclude=["decoder.0"])
    assert left(model) == {"encoder.0, decoder.0": "not chosen"}


# Computed weights.

COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by hooks": weight_norm,
    "spectral_norm by hooks": spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("converted_first", [False, True])
def test_computed_weights(how: str, converted_first: bool) -> None:
    model, x = nn.Sequential(nn.Linear(5, 5)).eval(), torch.randn(3, 5)
    layer: Any = model[0]
    if converted_first:
        qsim.convert(model, NEAREST)
    torch.manual_seed(2)
    COMPUTED[how](layer)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    native = model(x).detach()
    qsim.convert(model, NEAREST)
    assert list(model.state_dict()) == keys
    assert qsim.nn.conversion(model).changed == (("0", type(layer).__name__, NEAREST),)
    assert left(model) == {}
    value = model(x)
    assert same_bits(value, rounded(layer, x))
    for parameter, gradient in zip(parameters, torch.autograd.grad(value.sum(), parameters), strict=True):
        assert gradient.shape == parameter.shape
    copied = copy.deepcopy(model) if "hooks" not in how and how != "pruned" else model
    assert same_bits(copied(x), value)
    qsim.revert(model)
    assert same_bits(model(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert same_bits(model(x), native) != converted_first
    assert all(map(lambda a, b: a is b, model.parameters(), parameters))


def test_a_parametrization_may_be_removed_from_a_converted_layer() -> None:
    layer, x = nn.Linear(5, 5), torch.randn(3, 5)
    parametrizations.weight_norm(layer)
    qsim.convert(layer, NEAREST)
    weight = layer.weight.detach()
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is qsim.nn.Linear
    assert same_bits(layer.weight.detach(), weight)
    assert same_bits(layer(x), rounded(layer, x))
    assert type(qsim.revert(layer)) is nn.Linear


# Classes unknown to convert.


class Doubling(nn.Linear):
    """A layer with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Experts(nn.Module):
    """A module that multiplies by its own weights, with a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(2, 4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.gate = nn.Linear(4, 2)


def unknown() -> nn.Sequential:
    return nn.Sequential(
        Doubling(4, 4), Experts(), nn.LSTM(4, 4), nn.EmbeddingBag(3, 4), nn.Bilinear(2, 2, 2), nn.LayerNorm(4), nn.Linear(4, 4)
    )


def test_unknown_layers_round_their_products_and_are_named() -> None:
    model = unknown()
    types = [type(module) for module in model.modules()]
    found = qsim.nn.conversion(qsim.convert(model, NEAREST))
    assert [name for name, _, _ in found.changed] == ["1.gate", "6"]
    assert found.calls == (
        ("0", "any products with weight", NEAREST),
        ("1", "any products with stacked", NEAREST),
        ("2", "any products with weight_ih_l0, weight_hh_l0", NEAREST),
        ("4", "any products with weight", NEAREST),
    )
    assert found.left == (("3", "has weights of its own: weight"),)
    assert str(found).splitlines()[3] == f"1       calls       any products with stacked: {NEAREST}"
    x = torch.randn(2, 4)
    assert same_bits(model[0](x), 2 * rounded(model[0], x))
    assert [type(module) for module in qsim.revert(model).modules()] == types
    assert not [name for module in model.modules() for name in vars(module) if "call_points" in name]


def test_unknown_layers_are_left_alone_on_request() -> None:
    model = unknown()
    types = [type(module) for module in model.modules()]
    qsim.convert(model, NEAREST, exclude=["1.gate", "6"], calls="none")
    assert [type(module) for module in model.modules()] == types
    assert left(model) == {
        "0": f"convert does not know {__name__}.Doubling",
        "1": "has weights of its own: stacked",
        "1.gate": "not chosen",
        "2": "has weights of its own: weight_ih_l0, weight_hh_l0",
        "3": "has weights of its own: weight",
        "4": "has weights of its own: weight",
        "6": "not chosen",
    }
    with pytest.raises(ValueError, match="convert: calls must be 'parameters', 'all', 'none', got 'some'"):
        qsim.convert(model, NEAREST, calls="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["include", "points"])
def test_layers_without_products_cannot_be_requested(argument: str) -> None:
    model = nn.Sequential(Doubling(4, 4), nn.EmbeddingBag(4, 4), nn.Linear(4, 4))
    for name, calls, reason in (("0", "none", "convert does not know .*Doubling"), ("1", "all", "has weights of its own: weight")):
        given = {"include": [name]} if argument == "include" else {"points": {name: NEAREST, "2": NEAREST}}
        with pytest.raises(ValueError, match=f"{argument} pattern '{name}' matches no layer that can round; {name}: {reason}"):
            qsim.convert(model, **{"points": NEAREST, "calls": calls, **given})  # type: ignore[arg-type]
    assert type(model[2]) is nn.Linear
    qsim.convert(model, NEAREST, exclude=["0", "1"])
    assert type(model[0]) is Doubling


def test_classes_derived_from_layers_with_points_get_others() -> None:
    class Own(qsim.nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4))
    qsim.convert(model, NEAREST)
    assert type(model[0]) is Own
    assert qsim.nn.conversion(model).changed == (("0", "Own", NEAREST),)


# Layers that would not work, or would bypass their points.


def test_lazy_layers_are_refused_until_they_have_seen_an_input() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3), nn.LazyBatchNorm1d())

    model, x = make(), torch.randn(2, 4)
    for options in ({}, {"include": "1"}, {"points": {"*": NEAREST}}, {"points": "fp8_hybrid"}):
        given: dict[str, Any] = {"points": NEAREST, **options}
        with pytest.raises(ValueError, match=r"^convert: 1 is lazy and has seen no input: call the model once before, or exclude it$"):
            qsim.convert(model, **given)
    assert type(model[0]) is nn.Linear, "refused before anything changes"
    qsim.convert(model, NEAREST, exclude="1")
    assert left(model) == {"1": "is lazy and has seen no input: call the model once before"}
    model(x)
    qsim.convert(model, NEAREST)
    assert type(model[1]) is qsim.nn.Linear
    assert same_bits(model[1](x), rounded(model[1], x))
    last = qsim.convert(make(), qsim.recipes.fp8_hybrid().with_(last=1))
    assert [name for name, *_ in qsim.nn.conversion(last).changed] == ["0"], "the recipe keeps the lazy layer in high precision anyway"


def test_lazy_modules_of_other_classes_are_refused() -> None:
    class Own(nn.modules.lazy.LazyModuleMixin, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.UninitializedParameter()

        def initialize_parameters(self, x: Tensor) -> None:
            self.matrix.materialize((x.shape[-1], 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.matrix

    with pytest.raises(ValueError, match="convert: 1 is lazy and has seen no input"):
        qsim.convert(nn.Sequential(nn.Linear(4, 4), Own()), NEAREST)


class Quantized(Tensor):
    """A weight as other libraries keep it: codes and a scale, and operators of its own."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: float) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of quantized weights")


def test_weights_with_operators_of_their_own_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(Quantized(torch.ones(2, 2, dtype=torch.int8), 0.5), requires_grad=False)
    said = r"convert: 1 has a weight of the class .*\.Quantized, which computes by operators of its own .* or exclude it$"
    with pytest.raises(TypeError, match=said):
        qsim.convert(model, NEAREST)
    assert type(model[0]) is nn.Linear
    qsim.convert(model, NEAREST, exclude="1")
    assert left(model) == {"1": "not chosen"}


def test_weights_that_torchao_quantized_are_refused() -> None:
    torchao: Any = pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    with pytest.raises(TypeError, match=r"convert: 0 has a weight of the class torchao\..*: convert the model before another library"):
        qsim.convert(model, "mxfp8")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_not_rounded_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)
    with pytest.raises(TypeError, match=f"convert: 1 has a weight of {dtype}, and points round only float32, .* float64: exclude it"):
        qsim.convert(model, NEAREST)
    assert type(model[0]) is nn.Linear
    assert left(qsim.convert(model, NEAREST, exclude=["1"])) == {"1": "not chosen"}


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}], ids=repr)
def test_embeddings_that_cannot_round_are_refused(option: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(3, 2, **option), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="convert: 0 has max_norm or sparse=True, which cannot be combined with points: exclude it"):
        qsim.convert(model, NEAREST, embeddings=True)
    assert type(model[1]) is nn.Linear, "nothing is converted if something is refused"
    qsim.convert(model, NEAREST)
    qsim.revert(model)
    qsim.convert(model, NEAREST, exclude=["0"], embeddings=True)
    assert [type(module) for module in model] == [nn.Embedding, qsim.nn.Linear]


def test_a_forward_replaced_on_the_module_is_refused() -> None:
    # As in device maps and profilers; the points of a class could not take effect.
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="convert: 0 has a forward of its own, set on the module past its class: undo that, or exclude it"):
        qsim.convert(model, NEAREST)
    del model[0].forward
    assert type(qsim.convert(model, NEAREST)[0]) is qsim.nn.Linear


# Points that do not fit, or would not help.


def test_depthwise_convolutions_round_without_transforms() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8))
    found = qsim.nn.conversion(qsim.convert(model, "mxfp4"))
    given = qsim.recipes.mxfp4().points
    assert found.changed[0][2] == given
    assert found.changed[1][2].grad == dataclasses.replace(given.grad, transform=None)  # type: ignore[type-var]
    assert found.notes == (("1", f"without {given.grad.transform!r}, because its channels fall into groups"),)  # type: ignore[union-attr]
    assert str(found).splitlines()[-1].split() == ["1", "note", *found.notes[0][1].split()]
    model(torch.randn(2, 4, 5, 5)).sum().backward()
    assert qsim.nn.conversion(qsim.convert(model, NEAREST)).notes == ()
    assert "_without" not in vars(qsim.revert(qsim.convert(model, "mxfp4"))[1])


def test_weights_that_would_become_zero_cause_a_warning() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.02)
    words = r"'e2m1' without a scale rounds more than half of the weights of 0, 1, 2 and 2 more to zero, .* is 0.5: .*Tensor"
    with pytest.warns(UserWarning, match=words):
        qsim.convert(model, "weight_only('e2m1')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qsim.convert(model, FivePoint(weight=Quantizer("e2m1", scale=qsim.scaling.PerTensor()), weight_bwd=None))
        qsim.convert(model, FivePoint(weight=Quantizer("e2m1", "stochastic"), weight_bwd=None))
        qsim.convert(model, "weight_only('e4m3')")


def test_adapters_stay_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lora(nn.Module):
        """A layer of the form of PEFT's."""

        adapter_layer_names = ("lora_A", "lora_B", "lora_scale")

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4)
            self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(4, 4)}) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))  # type: ignore[no-any-return]

    monkeypatch.setattr(Lora, "__module__", "peft.tuners.lora.layer")
    model = qsim.convert(nn.Sequential(Lora()), NEAREST)
    names = [f"0.lora_{name}.default" for name in "AB"]
    assert left(model) == dict.fromkeys(names, "an adapter: adapters=True converts it")
    assert {p.module for p in qsim.coverage(model, torch.randn(2, 4)).products if p.reason} == set(names)
    with pytest.raises(ValueError, match=r"lora_A\.default: an adapter: adapters=True converts it"):
        qsim.convert(model, NEAREST, include="*lora_A*")
    assert left(qsim.convert(model, NEAREST, adapters=True)) == {}
