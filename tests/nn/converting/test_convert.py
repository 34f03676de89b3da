"""qsim.convert and qsim.revert: the same model, parameters, hooks and modes, with points; and which layers get which points."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from qsim.nn.modules import FivePointModule
from support.comparing import same_bits
from support.points import in_order

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="e4m3", weight_bwd="same", grad="e5m2")
OTHER = FivePoint(act="e2m1")
THIRD = FivePoint(weight="e3m2")


class Net(nn.Module):
    """Layers of several kinds, some nested."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = self.norm(x + self.conv(x.mT).mT)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["down"](block["up"](x).relu())
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)  # type: ignore[no-any-return]


LAYERS = ("conv", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "attention", "head")


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens() -> Tensor:
    return torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(1))


def points_of(model: nn.Module) -> dict[str, FivePoint]:
    """The points of each layer that has any."""
    return {name: module.points for name, module in model.named_modules() if isinstance(module, FivePointModule)}


def gradients(model: nn.Module) -> list[Tensor]:
    """A model's value and the gradients of its parameters."""
    torch.manual_seed(5)
    value = model(tokens())
    return [value.detach(), *torch.autograd.grad(value.square().sum(), list(model.parameters()))]


# Preserved state.


def test_everything_but_the_class_stays() -> None:
    model = net()
    model.blocks.eval()
    model.head.bfloat16()
    model.register_buffer("statistics", torch.ones(2))
    modules, parameters, keys = dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())
    modes = {name: module.training for name, module in modules.items()}
    facts = {name: (p.dtype, p.device, p.data_ptr(), p.requires_grad) for name, p in parameters.items()}
    assert qsim.convert(model, NEAREST, embeddings=True) is model
    assert set(points_of(model)) == {*LAYERS, "table"}
    for converted in (model, qsim.revert(model)):
        assert all(modules[name] is module for name, module in converted.named_modules())
        assert all(parameters[name] is parameter for name, parameter in converted.named_parameters())
        assert {name: (p.dtype, p.device, p.data_ptr(), p.requires_grad) for name, p in converted.named_parameters()} == facts
        assert list(converted.state_dict()) == keys
        assert {name: module.training for name, module in converted.named_modules()} == modes


def test_state_is_loaded_both_ways() -> None:
    native, converted = net(), qsim.convert(net(), NEAREST, embeddings=True)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(1.0)
    native.load_state_dict(converted.state_dict())
    assert all(map(same_bits, native.parameters(), converted.parameters()))
    other = qsim.convert(Net(), OTHER)
    other.load_state_dict(native.state_dict())
    assert all(map(same_bits, other.parameters(), converted.parameters()))


def test_an_optimizer_made_before_stays_valid() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        optimizer.step()

    step()
    qsim.convert(model, NEAREST)
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step()
        assert all(not torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    qsim.revert(model)
    step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_rounds_after_and_not_before_nor_when_reverted() -> None:
    model = net()
    native = gradients(model)
    converted = gradients(qsim.convert(model, NEAREST))
    assert all(not torch.equal(a, b) for a, b in zip(native, converted, strict=True))
    types = [type(module) for module in net().modules()]
    reverted = qsim.revert(model)
    assert all(map(same_bits, gradients(reverted), native))
    assert [type(module) for module in reverted.modules()] == types
    assert [vars(module).keys() for module in reverted.modules()] == [vars(module).keys() for module in net().modules()]
    assert all(map(same_bits, gradients(qsim.convert(reverted, NEAREST)), converted)), "the noise of a layer follows its name"


def test_hooks_stay() -> None:
    model, seen = net(), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append("forward"))
    model.head.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    model.conv.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    for converted in (qsim.convert(model, NEAREST), qsim.revert(model)):
        seen.clear()
        converted(tokens()).sum().backward()
        assert seen == ["before", "forward", "backward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_and_device_may_change_before_and_after(dtype: torch.dtype) -> None:
    x = tokens()
    first, second = qsim.convert(net().to(dtype), NEAREST), qsim.convert(net(), NEAREST).to(dtype)
    assert same_bits(first(x), second(x))
    with torch.device("meta"):
        skeleton = Net()
    qsim.convert(skeleton, NEAREST)
    assert skeleton(x.to("meta")).shape == (3, 5, 6)
    skeleton.to_empty(device="cpu").load_state_dict(net().state_dict())
    assert same_bits(skeleton(x), qsim.convert(net(), NEAREST)(x))


@pytest.mark.parametrize("made_again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_converted_and_revert(made_again: Callable[[nn.Module], Any]) -> None:
    noisy = in_order(*[Quantizer("e4m3", "stochastic")] * 5)
    model = qsim.convert(net(), noisy)
    copied = made_again(model)
    assert points_of(copied) == dict.fromkeys(LAYERS, noisy)
    # A copy's weights have their own noise.
    assert all(map(same_bits, gradients(copied), gradients(model))) == (made_again is not copy.deepcopy)
    qsim.revert(copied)
    assert points_of(copied) == {}
    assert set(points_of(model)) == set(LAYERS)


def test_a_model_that_is_a_layer() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    assert qsim.convert(layer, NEAREST, include=["*"]) is layer
    assert same_bits(layer(x), functional.linear(x, layer.weight, layer.bias, NEAREST))
    assert str(qsim.nn.conversion(layer)) == f"(the model)  Linear  {NEAREST}"
    assert type(qsim.revert(layer)) is nn.Linear


def test_layers_made_with_points_are_not_reverted() -> None:
    model = nn.Sequential(qsim.nn.Linear(2, 2, points=OTHER), nn.Linear(2, 2))
    qsim.revert(qsim.convert(model, NEAREST))
    assert [type(module) for module in model] == [qsim.nn.Linear, nn.Linear]
    assert points_of(model) == {"0": NEAREST}


# Assignment of points.


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, ["head"], LAYERS[:-1]),
        (["blocks"], None, LAYERS[1:5]),
        (["blocks.*.up"], None, ("blocks.0.up", "blocks.1.up")),
        (["blocks.0", "head"], None, ("blocks.0.up", "blocks.0.down", "head")),
        (["blocks.[01].down", "conv"], ["blocks.1"], ("conv", "blocks.0.down")),
        (["*"], ["*.up", "attention"], ("conv", "blocks.0.down", "blocks.1.down", "head")),
        (None, ["blocks", "table", "norm"], ("conv", "attention", "head")),
        ([], None, ()),
    ],
)
def test_patterns_name_layers_and_what_holds_them(include: Any, exclude: Any, expected: tuple[str, ...]) -> None:
    assert points_of(qsim.convert(net(), NEAREST, include, exclude)) == dict.fromkeys(expected, NEAREST)


def test_points_by_pattern_the_first_that_matches_counts() -> None:
    model = qsim.convert(net(), {"blocks.0.*": OTHER, "blocks": NEAREST, "head": FivePoint(), "attention": THIRD}, exclude=["*.down"])
    assert points_of(model) == {"blocks.0.up": OTHER, "blocks.1.up": NEAREST, "attention": THIRD, "head": FivePoint()}


def test_points_of_a_pattern_are_given_as_a_configuration_too() -> None:
    model = qsim.convert(net(), {"head": NEAREST.to_dict(), "conv": {"act": "e2m1"}})
    assert points_of(model) == {"head": NEAREST, "conv": OTHER}


@pytest.mark.parametrize(
    "points", [FivePoint("e4m3", "e4m3", act_bwd="same", grad=Quantizer("e5m2", "stochastic")), FivePoint(weight="e2m1")], ids=str
)
def test_points_of_all_layers_are_given_as_a_configuration_too(points: FivePoint) -> None:
    by_file = qsim.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), json.loads(points.to_json()))
    assert [layer.points for layer in by_file] == [points, points]
    assert qsim.convert(nn.Linear(2, 2), {"weight": "e2m1"}).points == FivePoint(weight="e2m1")


def test_a_recipe_is_given_as_a_configuration_too() -> None:
    recipe = qsim.recipes.Recipe("own", NEAREST, last=1, source="a test")
    model = qsim.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), json.loads(json.dumps(recipe.to_dict())))
    assert points_of(model) == {"0": NEAREST, "1": FivePoint()}


def test_layers_may_be_called_as_points_are() -> None:
    model = nn.ModuleDict({"act": nn.Linear(2, 2), "grad": nn.Linear(2, 2)})
    qsim.convert(model, {"act": FivePoint(act="e4m3"), "grad": {"weight": "e2m1"}})
    assert model["act"].points == FivePoint(act="e4m3")
    assert model["grad"].points == FivePoint(weight="e2m1")
    model = nn.ModuleDict({"name": nn.Linear(2, 2), "points": nn.Linear(2, 2)})
    assert points_of(qsim.convert(model, {"name": NEAREST, "points": OTHER})) == {"name": NEAREST, "points": OTHER}


def test_points_by_a_function() -> None:
    asked: dict[str, nn.Module] = {}

    def choose(name: str, module: nn.Module) -> FivePoint | None:
        asked[name] = module
        return NEAREST if isinstance(module, nn.Linear) and module.out_features > 8 else None

    model = net()
    assert set(points_of(qsim.convert(model, choose, exclude=["head"]))) == {"blocks.0.up", "blocks.1.up"}
    # The table is asked for because a model may use it as the weight of a product.
    assert asked == {name: model.get_submodule(name) for name in ("table", *LAYERS[:-1])}


def test_embeddings_where_they_are_asked_for() -> None:
    assert "table" not in points_of(qsim.convert(net(), NEAREST))
    lookup = FivePoint(weight=NEAREST.weight, grad=NEAREST.grad)
    model = qsim.convert(net(), NEAREST, ["table", "head"], embeddings=True)
    assert points_of(model) == {"table": lookup, "head": NEAREST}
    assert qsim.nn.conversion(model).changed[0] == ("table", "Embedding", lookup)


def test_converted_again_a_layer_gets_new_points_if_it_is_chosen() -> None:
    model = qsim.convert(net(), NEAREST)
    once = gradients(model)
    assert all(map(same_bits, gradients(qsim.convert(model, NEAREST)), once))
    qsim.convert(model, OTHER, include=["blocks.1"])
    assert points_of(model) == {name: OTHER if name.startswith("blocks.1") else NEAREST for name in LAYERS}
    assert not torch.equal(gradients(model)[0], once[0])
    assert all(map(same_bits, gradients(qsim.revert(model)), gradients(net())))


def test_converted_again_a_layer_keeps_its_points_where_a_recipe_gives_it_none() -> None:
    before = FivePoint("bf16", "bf16")
    model = qsim.convert(net(), before)
    qsim.convert(model, "nvfp4", exclude=["attention"])
    assert points_of(model)["head"] == before, "the recipe keeps the last layer in high precision"
    assert points_of(model)["attention"] == before
    assert points_of(model)["blocks.0.up"] == qsim.recipes.nvfp4().points
    # In a new model it has none.
    assert dict(qsim.nn.conversion(qsim.convert(net(), "nvfp4", exclude=["attention"])).left)["head"].startswith("kept in high precision")


def test_none_removes_points() -> None:
    model = qsim.convert(net(), NEAREST)
    qsim.convert(model, {"head": None, "blocks.1": OTHER})
    expected = {name: OTHER if name.startswith("blocks.1") else NEAREST for name in LAYERS if name != "head"}
    assert points_of(model) == expected
    assert type(model.head) is nn.Linear
    qsim.convert(model, lambda name, module: None if name == "attention" else THIRD)
    assert points_of(model) == {name: THIRD for name in LAYERS if name != "attention"}
    assert type(model.attention) is nn.MultiheadAttention
    built = nn.Sequential(qsim.nn.Linear(4, 2, points=OTHER))
    x = torch.randn(3, 4)
    assert torch.equal(qsim.convert(built, {"0": None})(x), nn.functional.linear(x, built[0].weight, built[0].bias))


def test_a_table_shows_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    model = qsim.convert(net(), OTHER, include=["blocks", "head"])
    qsim.convert(model, {"head": None, "blocks.1.up": THIRD}, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "blocks.1.up  Linear  act=e2m1  →  weight=e3m2",
        "head         Linear  act=e2m1  →  not chosen",
    ]
    qsim.convert(model, {"blocks.1.up": THIRD}, verbose=True)
    assert capsys.readouterr().out == "nothing changed\n"


# Reports.


def test_layers_of_blocks_share_a_row_where_it_is_the_same_for_all() -> None:
    model = qsim.convert(net(), OTHER, "blocks", "blocks.1.down")
    rows = [line.split("  ") for line in str(qsim.nn.conversion(model)).splitlines()]
    assert [[cell.strip() for cell in row if cell] for row in rows if row[0].startswith("blocks")] == [
        ["blocks.*.up", "Linear × 2", "act=e2m1"],
        ["blocks.0.down", "Linear", "act=e2m1"],
        ["blocks.1.down", "left alone", "not chosen"],
    ]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = qsim.convert(net(), {"blocks.0": OTHER, "head": NEAREST, "attention": THIRD}, verbose=True)
    expected = """
blocks.0.up    Linear              act=e2m1
blocks.0.down  Linear              act=e2m1
attention      MultiheadAttention  weight=e3m2
head           Linear              act=e4m3, weight=e4m3, act_bwd=e4m3, grad=e5m2
table          left alone          an embedding: embeddings=True converts it
conv           left alone          not chosen
blocks.1.up    left alone          not chosen
blocks.1.down  left alone          not chosen
"""
    assert capsys.readouterr().out == expected[1:]
    told = qsim.nn.conversion(model)
    assert str(told) == expected.strip()
    assert told.changed[0] == ("blocks.0.up", "Linear", OTHER)
    assert told.left[0] == ("table", "an embedding: embeddings=True converts it")
    assert str(qsim.nn.conversion(nn.ReLU())) == "no layer that could round"


def test_it_is_silent_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    qsim.convert(net(), NEAREST)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            {"points": {"head": NEAREST, "heads.*": NEAREST}},
            ValueError,
            r"points pattern 'heads.\*' matches no layer; did you mean 'head'",
        ),
        ({"include": ["zzz"]}, ValueError, "convert: include pattern 'zzz' matches no layer; there are '.*', '.*', '.*', …"),
        ({"include": ["table"]}, ValueError, "'table' matches no layer that can round; table: an embedding: embeddings=True converts it"),
        ({"include": ["attention.out_proj"]}, ValueError, "pattern 'attention.out_proj' matches no layer; did you mean 'attention'"),
        ({"include": "hed"}, ValueError, "convert: include pattern 'hed' matches no layer; did you mean 'head'"),
        ({"exclude": "block"}, ValueError, "convert: exclude pattern 'block' matches no module; did you mean 'blocks'"),
        ({"exclude": [3]}, TypeError, "convert: the patterns of exclude must be strings, got 3"),
        ({"exclude": 0}, TypeError, "convert: exclude must be a pattern of names, several patterns or None, got 0"),
        ({"exclude": False}, TypeError, "convert: exclude must be a pattern of names, several patterns or None, got False"),
        ({"include": 0}, TypeError, "convert: include must be a pattern of names, several patterns or None, got 0"),
        (
            {"points": {"blocks": NEAREST, "head": OTHER, "blocks.1.up": OTHER}},
            ValueError,
            "points pattern 'blocks.1.up' comes too late: 'blocks' before it matches blocks.1.up, and the first that matches counts",
        ),
        ({"points": {"head": {"acts": "e4m3"}}}, ValueError, "FivePoint has no point 'acts'"),
        ({"points": {"head": 3}}, TypeError, "convert: head: points must be a FivePoint, a recipe, .* got 3"),
        ({"points": lambda name, module: 3}, TypeError, "convert: conv: points must be a FivePoint, a recipe, .* got 3"),
        ({"points": "e4mm3"}, ValueError, "unknown recipe 'e4mm3': there are fp8_hybrid"),
        ({"points": "fp8"}, ValueError, "unknown recipe 'fp8': did you mean 'fp8_hybrid'"),
        ({"points": "weight_only"}, ValueError, "the recipe weight_only is for any format: say which, as in weight_only.'e4m3'."),
        (
            {"points": None},
            TypeError,
            "convert: points must be a FivePoint, a recipe or its name, a dictionary of points by name, or a function .* got None",
        ),
        ({"model": NEAREST, "points": net}, TypeError, "convert: model must be a torch.nn.Module, got FivePoint"),
    ],
)
def test_errors_are_clear_and_nothing_changes(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    model = net()
    with pytest.raises(kind, match=words):
        qsim.convert(**{"model": model, "points": NEAREST, **arguments})
    assert points_of(model) == {}


def test_patterns_of_a_model_without_layers() -> None:
    one = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="include pattern 'fc' matches no layer; the only one is the model itself"):
        qsim.convert(one, NEAREST, include="fc")
    with pytest.raises(ValueError, match="exclude pattern 'fc' matches no module; the model has none in it"):
        qsim.convert(one, NEAREST, exclude="fc")
    with pytest.raises(ValueError, match="pattern 'fc' matches no layer; the model has none that could round"):
        qsim.convert(nn.Sequential(nn.ReLU()), NEAREST, include=["fc"])


def test_a_model_that_only_multiplies_by_its_embedding_is_converted_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    qsim.convert(nn.Sequential(nn.Embedding(3, 2)), NEAREST)
    assert not recwarn.list


def test_a_model_in_which_nothing_can_round_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match="convert: the model has no layer that could round"):
        qsim.convert(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), NEAREST)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v3", "tens of times as long as a native one, because every sum is emulated number by number"),
        ("quartet2", "several times as long as a native one, because each block is rounded to both of two scales"),
    ],
)
def test_a_recipe_that_is_slow_on_a_cpu_warns_where_there_is_nothing_else(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def converted(points: Any) -> None:
        qsim.convert(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), points)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    said = f"convert: a training step of a layer in {name} takes {reason}, on a CPU, and this machine has no accelerator"
    for points in (name, qsim.recipes.resolve(name)):
        with pytest.warns(UserWarning, match=re.escape(said)):
            converted(points)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted("mxfp4")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        converted(name)
