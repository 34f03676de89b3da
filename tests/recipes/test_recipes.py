"""Recipes: their points match their sources, their names and descriptions, and the layers they keep in high precision."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qsim
from qsim import Block, FivePoint, Float, Int, Quantizer, recipes
from qsim.accumulators import Promoted, Rounded
from qsim.cli import main
from qsim.nn import functional
from qsim.points import DGE, Clamped, FourOverSix, MSEden, OuterScale, Rotated, TransformerEngineNVFP4, TrustMask
from qsim.recipes import Recipe
from qsim.recipes.named import SHOWN_IN
from qsim.scaling import Delayed, PerBlock, PerRow, PerTensor, PerTile, Scaling
from qsim.transforms import Hadamard
from support.points import in_order

IBM = "e4m3b11fnuz"
MX8 = Quantizer("e4m3", scale=PerBlock(32, format="e8m0", rule="ceil"))
MX4 = Quantizer("e2m1", scale=PerBlock(32, format="e8m0", rule="floor"))
MX4_NOISY = Quantizer("e2m1", "stochastic", scale=PerBlock(32, format="e8m0", rule="ceil"), transform=Hadamard(32))
ROWS = Quantizer("e4m3", scale=PerRow())
ROWS_UP = Quantizer("e4m3", scale=PerRow(format="e8m0", rule="ceil"))
WIDE = Quantizer("e4m3", scale=PerBlock(128, format="e8m0", rule="ceil"))
E2M3, E3M2 = (Quantizer(name, scale=PerBlock(32, format="e8m0", rule="floor")) for name in ("e2m3", "e3m2"))
NV = PerBlock(16, format="e4m3", rule="fit", outer=PerTensor())
NV_UP = PerBlock(16, format="e4m3", rule="ceil", outer=PerTensor(rule="ceil"))
INT = Quantizer(Int(8, symmetric=True), scale=PerRow())
INT_4 = Quantizer(Int(4, symmetric=True), scale="tensor")
POWERS = Quantizer(Float(3, 0), "stochastic", scale=PerTensor(rule="ceil"))
UNIFORM = Quantizer(Float(1, 2), scale=NV, transform=Hadamard(16))
UNIFORM_NOISY = Quantizer(Float(1, 2), "stochastic", scale=NV_UP, transform=Hadamard(16))
NOISY = Quantizer("e4m1", "stochastic")
EDEN, EDEN_128 = (Rotated(MSEden(size), Hadamard(size), "call") for size in (32, 128))
NESTED = Block("e2m1", 16, scale="e4m3", rule="fit")
NESTED_UP = Quantizer("e2m1", "stochastic", scale=PerBlock(16, format="e4m3", rule="ceil"))
TETRA = Rotated(OuterScale(NESTED_UP, PerBlock(128)), Hadamard(16), "call")


def hybrid(scale: Scaling) -> FivePoint:
    operand = Quantizer("e4m3", scale=scale)
    return FivePoint(operand, operand, act_bwd="same", weight_bwd="same", grad=Quantizer("e5m2", scale=scale))


#: The points of each recipe: act, weight, act_bwd, weight_bwd, grad, grad_w.
EXPECTED: list[tuple[Recipe, FivePoint]] = [
    (recipes.fp8_hybrid(), hybrid(PerTensor())),
    (recipes.fp8_hybrid(PerTensor("e8m0", margin=1)), hybrid(PerTensor("e8m0", margin=1))),
    (recipes.fp8_hybrid(Delayed(16)), hybrid(Delayed(16))),
    (recipes.fp8_hybrid(PerRow()), FivePoint(ROWS, ROWS, act_bwd=ROWS, weight_bwd=ROWS, grad=Quantizer("e5m2", scale=PerRow()))),
    (recipes.torchao_rowwise(), FivePoint(ROWS_UP, ROWS_UP, act_bwd=ROWS_UP, weight_bwd=ROWS_UP, grad=ROWS_UP)),
    (
        recipes.torchao_rowwise(weight_gradient=False),
        FivePoint(
            ROWS_UP,
            ROWS_UP,
            act_bwd=None,
            weight_bwd=Quantizer("e4m3", scale=PerTensor("e8m0", "ceil")),
            grad=ROWS_UP,
            grad_w="fp32",
        ),
    ),
    (
        recipes.fp8_blockwise(),
        FivePoint(WIDE, Quantizer("e4m3", scale=PerTile(128, 128, format="e8m0", rule="ceil")), act_bwd=WIDE, weight_bwd="same", grad=WIDE),
    ),
    (
        recipes.deepseek_v3(),
        FivePoint(WIDE, "fp8_128x128", act_bwd=WIDE, weight_bwd="same", grad=WIDE, accumulate=Promoted("h100_fp8", 128)),
    ),
    (recipes.hfp8(), FivePoint(IBM, IBM, act_bwd="same", weight_bwd="same", grad="e5m2")),
    (recipes.hfp8(chunk=64), FivePoint(IBM, IBM, act_bwd="same", weight_bwd="same", grad="e5m2", accumulate=Rounded("e6m9", chunk=64))),
    (recipes.mxfp8(), FivePoint(MX8, MX8, act_bwd=MX8, weight_bwd=MX8, grad=MX8)),
    (recipes.mxfp6(), FivePoint(E3M2, E3M2, act_bwd=E3M2, weight_bwd=E3M2, grad=E3M2)),
    (recipes.mxfp6("mxfp6_e2m3"), FivePoint(E2M3, E2M3, act_bwd=E3M2, weight_bwd=E3M2, grad=E3M2)),
    (recipes.mxfp4(), FivePoint(MX4, MX4, act_bwd=MX4_NOISY, weight_bwd=MX4_NOISY, grad=MX4_NOISY)),
    (recipes.mxfp4(forward=None), FivePoint(None, None, act_bwd=MX4_NOISY, weight_bwd=MX4_NOISY, grad=MX4_NOISY)),
    (recipes.mxfp4(forward="mxfp8"), FivePoint("mxfp8", "mxfp8", act_bwd=MX4_NOISY, weight_bwd=MX4_NOISY, grad=MX4_NOISY)),
    (
        recipes.nvfp4(),
        FivePoint(
            Quantizer("e2m1", scale=NV),
            Quantizer("e2m1", scale=PerTile(16, 16, format="e4m3", rule="fit", outer=PerTensor())),
            act_bwd=Quantizer("e2m1", scale=NV, transform=Hadamard(16)),
            weight_bwd="same",
            grad=Quantizer("e2m1", "stochastic", scale=NV_UP),
            grad_w=Quantizer("e2m1", "stochastic", scale=NV_UP, transform=Hadamard(16)),
        ),
    ),
    (
        recipes.te_nvfp4(),
        FivePoint(
            TransformerEngineNVFP4(),
            TransformerEngineNVFP4(PerTile(16, 16)),
            act_bwd=Rotated(TransformerEngineNVFP4(), Hadamard(16, seed=56541)),
            weight_bwd="same",
            grad=TransformerEngineNVFP4(rounding="stochastic"),
            grad_w=Rotated(TransformerEngineNVFP4(rounding="stochastic"), Hadamard(16, seed=56541)),
        ),
    ),
    (recipes.ufp4(), FivePoint(UNIFORM, UNIFORM, act_bwd=UNIFORM, weight_bwd=UNIFORM, grad=UNIFORM_NOISY)),
    (recipes.luq(), FivePoint(INT_4, INT_4, act_bwd="same", weight_bwd="same", grad=POWERS)),
    (recipes.lsq(act="uint4"), FivePoint("LSQ('uint4')", "LSQ('int4')")),
    (recipes.quest(2), FivePoint(*[Rotated(TrustMask.quest(2), Hadamard(128, random_signs=False))] * 2)),
    (
        recipes.fp4_dge(),
        FivePoint(Clamped(Quantizer("e2m1", scale=PerRow())), DGE(Quantizer("e2m1", scale=PerRow(0))), Quantizer("e5m2", scale="tensor")),
    ),
    (
        recipes.four_over_six(error="mae", reach=448),
        FivePoint(
            FourOverSix(reach=448),
            FourOverSix(PerTile(16, 16), reach=448),
            FourOverSix(reach=448, rounding="stochastic"),
            act_bwd=Rotated(FourOverSix(reach=448), Hadamard(16)),
            grad_w=Rotated(FourOverSix(reach=448, rounding="stochastic"), Hadamard(16)),
        ),
    ),
    (recipes.ms_eden("nvfp4"), FivePoint("nvfp4", "nvfp4", EDEN, act_bwd=EDEN, weight_bwd=EDEN)),
    (
        recipes.quartet2(size=128),
        FivePoint(
            *["FourOverSix(error='mse')"] * 2,
            EDEN_128,
            act_bwd=EDEN_128,
            weight_bwd=EDEN_128,
            backward_of="rounded",
        ),
    ),
    (
        recipes.tetrajet2(),
        FivePoint(
            *[OuterScale(NESTED, PerBlock(128))] * 2,
            TETRA,
            act_bwd=TETRA,
            weight_bwd=TETRA,
            backward_of="rounded",
        ),
    ),
    (
        recipes.int8(),
        FivePoint(INT, INT, act_bwd=INT, weight_bwd=INT, grad=Quantizer(Int(8, symmetric=True), "stochastic", scale=PerRow())),
    ),
    (recipes.stochastic_backward("e4m1"), FivePoint(None, "e4m1", act_bwd=NOISY, weight_bwd="same", grad=NOISY)),
    (recipes.weight_only("e2m1"), FivePoint(weight="e2m1", weight_bwd="same")),
    (recipes.nearest_everywhere("e4m1"), FivePoint("e4m1", "e4m1", act_bwd="e4m1", weight_bwd="e4m1", grad="e4m1")),
    (recipes.nearest_everywhere("mxfp4"), FivePoint(MX4, MX4, act_bwd=MX4, weight_bwd=MX4, grad=MX4)),
]
#: One recipe for each name.
ALL = {name: recipes.resolve(name, SHOWN_IN) for name in recipes.NAMED}


class TestPoints:
    @pytest.mark.parametrize(("recipe", "points"), EXPECTED, ids=lambda value: value.name if isinstance(value, Recipe) else "")
    def test_are_those_of_the_source(self, recipe: Recipe, points: FivePoint) -> None:
        assert recipe.points == points

    def test_generic_recipes_take_scales(self) -> None:
        nearest, noisy = Quantizer("e2m1", scale="tensor"), Quantizer("e2m1", "stochastic", scale="tensor")
        assert recipes.weight_only("e2m1", scale="tensor").points == FivePoint(weight=nearest, weight_bwd="same")
        assert recipes.stochastic_backward("e2m1", scale=PerTensor()).points == FivePoint(
            None, nearest, act_bwd=noisy, weight_bwd="same", grad=noisy
        )
        assert recipes.resolve("nearest_everywhere('e2m1', scale='tensor')").points == in_order(*[nearest] * 5)
        with pytest.raises(ValueError, match="has scales of its own, got scale='tensor'"):
            recipes.nearest_everywhere("mxfp4", scale="tensor")

    def test_descriptions_show_the_range_of_points_without_scales(self) -> None:
        assert "range without scales: weight from 0.5 to 6" in recipes.weight_only("e2m1").describe()
        for recipe in (recipes.weight_only("e2m1", scale="tensor"), recipes.weight_only("bf16"), recipes.mxfp8()):
            assert "without scales" not in recipe.describe()

    @pytest.mark.parametrize("name", sorted(set(recipes.NAMED) & set(qsim.scaling.NAMED)))
    def test_a_name_means_the_same_numbers_as_a_recipe_and_as_a_format(self, name: str) -> None:
        points = recipes.resolve(name).points
        assert {point.format for point in (points.act, points.weight, points.grad)} == {qsim.scaling.NAMED[name].element}

    def test_every_recipe_is_among_these(self) -> None:
        assert {recipe.name for recipe, _ in EXPECTED} == set(recipes.NAMED)

    @pytest.mark.parametrize("name", recipes.NAMED)
    def test_names_and_sources(self, name: str) -> None:
        assert ALL[name].name == name
        known = ("arXiv 2", "arXiv 1902", "NeurIPS 2019", "Training with Fewer Bits", "torchao 0.18")
        assert any(year in ALL[name].source for year in known)

    @pytest.mark.parametrize("room", ["formats", "points", "recipes", "control"])
    def test_nothing_here_touches_a_backend(self, room: str) -> None:
        files = [*Path(recipes.__file__).parents[1].glob(f"{room}/*.py")]
        assert files
        for file in files:
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"qsim_kernels\.(torch|numba|triton|lowered|meanings|arithmetic)\b", text), file

    def test_which_recipes_keep_layers(self) -> None:
        kept = {name: (recipe.first, recipe.last) for name, recipe in ALL.items() if recipe.first or recipe.last}
        both = dict.fromkeys(("hfp8", "luq", "lsq"), (1, 1))
        assert kept == both | dict.fromkeys(("nvfp4", "te_nvfp4", "four_over_six", "fp8_blockwise", "deepseek_v3"), (0, 1))

    @pytest.mark.parametrize("name", ["act", "weight", "grad"])
    def test_bfloat16_holds_what_fp8_blockwise_multiplies(self, name: str) -> None:
        point = getattr(recipes.fp8_blockwise().points, name)
        values = point(torch.randn(256, 256) * torch.logspace(-6, 6, 256))
        assert torch.equal(values.bfloat16().float(), values)

    def test_formats_may_be_blocks_where_directions_allow_it(self) -> None:
        tiles = Block("e2m1", (4, 4))
        assert recipes.weight_only(tiles).points.weight == Quantizer(tiles)
        for make in (recipes.weight_only, recipes.stochastic_backward):  # rounded again along the other direction
            assert make("mxfp4").points.used["weight_bwd"] == Quantizer("mxfp4")

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: recipes.fp8_hybrid("channel"), ValueError, "scale must be 'tensor', .* got 'channel'"),
            (lambda: recipes.nvfp4().with_(last=-1), ValueError, "Recipe: last must be in 0…2147483648, got -1"),
            (lambda: recipes.nvfp4().with_(last=0.15), TypeError, "Recipe: last must be an int, got 0.15"),
            (
                lambda: recipes.nvfp4(outer=PerRow()),
                TypeError,
                r"nvfp4: outer must be a qsim.scaling.PerTensor or .*, got PerRow\(",
            ),
            (lambda: recipes.weight_only("e9m9"), ValueError, "FivePoint: weight: "),
            (lambda: recipes.mxfp4(forward="mxfp5"), ValueError, "unknown format 'mxfp5'"),
        ],
    )
    def test_wrong_arguments(self, make: Callable[[], Recipe], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            make()


class TestRecipe:
    @pytest.mark.parametrize("recipe", [recipe for recipe, _ in EXPECTED], ids=lambda recipe: recipe.name)
    def test_goes_to_plain_values_and_back(self, recipe: Recipe) -> None:
        given = json.loads(json.dumps(recipe.to_dict()))
        assert Recipe.from_dict(given) == recipe
        assert hash(Recipe.from_dict(given)) == hash(recipe)

    def test_prints_in_a_line(self) -> None:
        points = "act=e4m3 tensor, weight=e4m3 tensor, grad=e5m2 tensor"
        assert str(recipes.fp8_hybrid()) == f"fp8_hybrid: {points}"
        assert str(Recipe("mine", FivePoint(act="e4m3"), 2, 1)) == "mine: act=e4m3; high precision: the first 2 and the last layers"
        assert str(Recipe("mine", FivePoint(act="e4m3"), last=1)) == "mine: act=e4m3; high precision: the last layer"

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ([], TypeError, r"Recipe: a configuration is a dictionary, got \[\]"),
            ({"name": "a"}, TypeError, "Recipe: a configuration needs points, got {'name': 'a'}"),
            ({"name": "a", "points": {}, "lost": 1}, ValueError, "Recipe has no 'lost'; it has name, points, first, last, source"),
            ({"name": 3, "points": {}}, TypeError, "Recipe: name must be a string, got 3"),
            ({"name": "a", "points": {}, "first": True}, TypeError, "Recipe: first must be an int, got True"),
            ({"name": "a", "points": "e4m3"}, TypeError, "FivePoint: a configuration is a dictionary of points, got 'e4m3'"),
        ],
    )
    def test_wrong_configurations(self, given: object, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            Recipe.from_dict(given)

    def test_points_must_be_points(self) -> None:
        with pytest.raises(TypeError, match="Recipe: points must be a FivePoint, got 'e4m3'"):
            Recipe("a", "e4m3")


class TestDescribe:
    def test_a_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        recipes.describe("nvfp4")
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "nvfp4"
        assert lines[1].split() == ["point", "format", "scale", "rounding", "after"]
        assert lines[2].split(maxsplit=2) == ["act", "e2m1", "blocks(16, e4m3, under tensor)              nearest       -"]
        assert lines[5] == "  weight_bwd  same as weight"
        assert lines[7].endswith("blocks(16, e4m3, ceil, under tensor(ceil))  Stochastic()  hadamard(16)")
        assert lines[8] == "  high precision: the last layer"
        assert lines[9] == "  source: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149"

    def test_capitals(self) -> None:
        assert recipes.resolve("NVFP4") == recipes.resolve("nvfp4")

    def test_a_call_and_a_recipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        recipes.describe("nvfp4.with_(last=4)")
        told = capsys.readouterr().out
        assert "high precision: the last 4 layers" in told
        recipes.describe(recipes.nvfp4().with_(last=4))
        assert capsys.readouterr().out == told

    def test_no_name_lists_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        recipes.describe()
        heading, *lines = capsys.readouterr().out.splitlines()
        assert heading.split() == ["bits", "recipe", "act,", "weight,", "grad:", "summary"]
        assert [line.split()[1].removesuffix("(format)") for line in lines] == list(recipes.NAMED)
        bits = [line.split()[0] for line in lines]
        assert [group for group, _ in itertools.groupby(bits)] == ["8", "6", "4", "any"]
        columns = [" ".join(cell.split()) for cell in lines[-2].split("  ") if cell]
        summary = "-, any, -: Round only the weight, with round-to-nearest, once for both passes"
        assert columns == ["any", "weight_only(format)", summary]
        assert "e4m3b11fnuz, e4m3b11fnuz, e5m2: " in next(line for line in lines if " hfp8 " in line)

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("nf4", ValueError, "unknown recipe 'nf4': there are fp8_hybrid"),
            ("fp4", ValueError, "unknown recipe 'fp4': did you mean 'mxfp4'\\?"),
            ("nvpf4", ValueError, "unknown recipe 'nvpf4': did you mean 'nvfp4'\\? There are fp8_hybrid, torchao_rowwise, "),
            ("fp8_hybrid(accumulate='h100_fp8')", TypeError, r"Options of all recipes follow as in 'nvfp4\.with_\(first=1, last=4\)'"),
            ("nvfp4.with_(4", ValueError, r"options follow a recipe as in 'nvfp4\.with_\(first=1, last=4\)'"),
            ("nvfp4.with_(lats=4)", TypeError, "unexpected keyword argument 'lats'"),
            ("e4m1", ValueError, "'e4m1' is a format: FivePoint.act='e4m1', weight='e4m1'. rounds inputs and weights to it"),
            ("nvfp4.with_(last=-1)", ValueError, "Recipe: last must be in 0"),
            ("nvfp4(last=4)", TypeError, r"'last'. Options of all recipes follow as in 'nvfp4\.with_\(first=1, last=4\)'"),
            ("mxfp8(32)", TypeError, "mxfp8"),
            (4, TypeError, "a recipe's name must be a string, got 4"),
        ],
    )
    def test_unknown_names(self, name: str, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            recipes.describe(name)

    def test_on_the_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words, name in (([], None), (["mxfp4"], "mxfp4"), (["weight_only('e4m1')"], "weight_only('e4m1')")):
            assert main(["recipes", *words]) == 0
            told = capsys.readouterr().out
            recipes.describe(name)
            assert told == capsys.readouterr().out
        assert main(["recipes", "mxpf4"]) == 2
        assert capsys.readouterr().err.startswith("qsim: unknown recipe 'mxpf4': did you mean 'mxfp4'?")

    def test_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["recipes", "nvfp4", "--json"]) == 0
        assert Recipe.from_dict(json.loads(capsys.readouterr().out)) == recipes.nvfp4()
        assert main(["recipes", "--json"]) == 0
        assert {name: Recipe.from_dict(one) for name, one in json.loads(capsys.readouterr().out).items()} == ALL


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


class TestConvert:
    def test_keeps_the_first_and_the_last(self) -> None:
        recipe = Recipe("mine", FivePoint(act="e4m3"), first=1, last=2)
        model = qsim.convert(layers(5), recipe)
        assert [layer.points.is_identity for layer in model] == [True, False, False, True, True]
        assert model[1].points == recipe.points
        x = torch.randn(3, 6)
        assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))

    def test_counts_layers_that_are_not_chosen(self) -> None:
        model = qsim.convert(layers(5), Recipe("mine", FivePoint(act="e4m3"), first=2, last=1), exclude=["0", "3"])
        assert [type(layer) is nn.Linear for layer in model] == [True, False, False, True, False]
        assert [layer.points.is_identity for layer in model if type(layer) is not nn.Linear] == [True, False, True]
        model = qsim.convert(layers(3), recipes.nvfp4(), exclude="2")
        assert [type(layer) is nn.Linear or layer.points.is_identity for layer in model] == [False, False, True]

    def test_by_name(self) -> None:
        assert qsim.convert(layers(3), "nvfp4.with_(last=2)")[0].points == recipes.nvfp4().points
        assert [layer.points.is_identity for layer in qsim.convert(layers(3), "nvfp4.with_(last=2)")] == [False, True, True]
        assert qsim.nn.Linear(4, 2, points="weight_only('e4m1')").points == recipes.weight_only("e4m1").points

    def test_a_layer_that_rounded_before_is_kept_too(self) -> None:
        model = qsim.convert(layers(3), FivePoint(act="e2m1"))
        qsim.convert(model, recipes.nvfp4())
        assert [layer.points == recipes.nvfp4().points for layer in model] == [True, True, False]
        assert model[2].points == FivePoint(act="e2m1"), "the recipe leaves it in high precision, and so it keeps its own"
        qsim.convert(model, recipes.mxfp8())
        assert all(layer.points == recipes.mxfp8().points for layer in model)
        assert all(type(layer) is nn.Linear for layer in qsim.revert(model))

    def test_the_layers_kept_in_high_precision_are_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = qsim.convert(layers(2), recipes.nvfp4(), verbose=True)
        told = capsys.readouterr().out
        assert told == f"{qsim.nn.conversion(model)}\n"
        kept = "kept in high precision by the recipe nvfp4"
        assert told.splitlines()[1] == f"1  left alone  {kept}"
        assert qsim.nn.conversion(model).left == (("1", kept),)
        qsim.convert(model, FivePoint())
        assert [reason for _, reason in qsim.nn.conversion(model).left] == ["kept in high precision: its points round nothing"] * 2
        assert vars(qsim.revert(model)[1]).keys() == vars(nn.Linear(6, 6)).keys()

    @pytest.mark.parametrize("count", [0, 1, 2])
    def test_too_few_layers(self, count: int) -> None:
        model = layers(count)
        message = "keeps the first 1 and the last {} of {} layers in high precision, which leaves none that was chosen: give recipe.points"
        with pytest.raises(ValueError, match="the recipe hfp8 " + message.format(1, count)):
            qsim.convert(model, recipes.hfp8())
        with pytest.raises(ValueError, match="the recipe mine " + message.format(3, count)):
            qsim.convert(model, Recipe("mine", FivePoint(act="e4m3"), first=1, last=3))
        assert all(type(layer) is nn.Linear for layer in model)
        qsim.convert(model, recipes.hfp8().points)

    def test_modules_take_its_points(self) -> None:
        assert qsim.nn.Linear(4, 2, points=recipes.nvfp4()).points == recipes.nvfp4().points

    def test_other_places_say_where_the_points_are(self) -> None:
        x, recipe = torch.ones(2, 2), recipes.mxfp8()
        for given in (recipe, "mxfp8"):
            assert torch.equal(functional.linear(x, x, points=given), functional.linear(x, x, points=recipe.points))
        for points in ({"0": recipe}, lambda name, module: recipe):
            with pytest.raises(
                TypeError, match=r"the points of 0 are those of one layer, and a recipe is for a model: give recipe\.points"
            ):
                qsim.convert(layers(2), points)


def test_scales_of_recipes_may_be_texts() -> None:
    assert recipes.resolve("fp8_hybrid('Delayed(16)')") == recipes.fp8_hybrid(qsim.scaling.Delayed(16))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (recipes.mxfp8, "makes points or a recipe, call it, got <function mxfp8 .*: too many positional arguments"),
        (3, "points must be a FivePoint, a recipe .* got 3"),
    ],
)
def test_incomplete_recipes_raise_an_error(points: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        qsim.convert(torch.nn.Linear(2, 2), points)  # type: ignore[arg-type]


def test_grouped_convolutions_with_scales_for_channels_are_refused_when_they_are_converted() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(ValueError, match=r"convert: 0: Conv2d: .*channels .*groups.* Give this layer other points, or exclude it"):
        qsim.convert(model, recipes.int8())
    assert type(model[0]) is torch.nn.Conv2d


@pytest.mark.parametrize("name", sorted(ALL))
def test_options_that_all_recipes_share(name: str) -> None:
    recipe = ALL[name]
    assert recipe.with_() == recipe
    changed = recipe.with_(first=2, last=3)
    assert (changed.first, changed.last, changed.points, changed.name) == (2, 3, recipe.points, recipe.name)
    summed = recipe.with_(accumulate="Rounded('fp32')", chip="never")
    assert summed.points.accumulate == qsim.accumulators.Rounded("fp32")
    assert summed.points.chip == "never"
    assert summed.with_(accumulate=None, chip="auto").points == recipe.with_(accumulate=None, chip="auto").points
