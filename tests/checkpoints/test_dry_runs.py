"""A dry run says what an export would write, and what it cannot, before training and without writing anything."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import FivePoint, Quantizer, scaling
from support import exported

GRADIENTS = FivePoint(grad="e5m2")


def model_of_many_kinds() -> nn.Sequential:
    layers = [nn.Linear(64, 64), nn.Linear(64, 50), nn.Linear(50, 32), nn.Linear(32, 32), nn.Linear(32, 2)]
    return qsim.convert(nn.Sequential(*layers), {"3": GRADIENTS, "*": qsim.recipes.mxfp8().points}, exclude=["4"])


def test_a_dry_run_lists_every_layer_and_writes_nothing(tmp_path: Path) -> None:
    model = model_of_many_kinds()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = qsim.export(model, tmp_path / "out", exclude="1", dry_run=True)
    assert found.layers == (("0", "weight=e4m3 blocks(32, e8m0, ceil), act=e4m3 blocks(32, e8m0, ceil)", ""),)
    ((name, reason),) = found.refused
    assert (name, reason[:64]) == ("2", "its weight, e4m3 blocks(32, e8m0, ceil) with 50 columns, must ha")
    assert found.kept == (("1", "excluded from the export"), ("3", "its weight is not rounded: grad=e5m2"), ("4", "not chosen"))
    lines = [line.split()[:2] for line in str(found).splitlines()]
    assert lines == [["0", "written"], ["2", "refused"], ["1", "high"], ["3", "high"], ["4", "high"]]
    assert list(tmp_path.iterdir()) == []
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    with pytest.raises(ValueError, match=r"export: layout 'compressed-tensors' cannot express 2: its weight, e4m3 blocks"):
        qsim.export(model, tmp_path / "out", exclude="1")


def test_exports_are_records(tmp_path: Path) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2)), "mxfp8", exclude=["1"])
    found, written = (qsim.export(model, tmp_path / "out", dry_run=dry_run) for dry_run in (True, False))
    assert isinstance(found, qsim.diagnostics.Records)
    assert [layer.outcome for layer in found] == ["written", "high precision"]
    assert found["1",].note == "not chosen"
    assert (found.folder, written.folder) == (None, tmp_path / "out")
    assert json.loads(written.to_json())["folder"] == str(tmp_path / "out")
    assert written.rows()[0]["layer"] == "0"
    assert str(written) == "0  written  weight=e4m3 blocks(32, e8m0, ceil), act=e4m3 blocks(32, e8m0, ceil)"


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_an_export_writes_what_a_dry_run_says(layout: str, tmp_path: Path) -> None:
    points = exported.BLOCKS | {name: exported.FP8[name] for name in ("tensor", "channel", "stochastic")}
    model, example = exported.model_of(points, rows=128), torch.randn(2, 128)
    found = qsim.export(model, tmp_path, layout, example=example, weight_only=layout == "torchao", dry_run=True)
    assert found.refused == ()
    written = qsim.export(model, tmp_path, layout, example=example, weight_only=layout == "torchao")
    assert [row[:2] for row in found.layers] == [row[:2] for row in written.layers]
    assert {row[2] for row in found.layers} == {"", "nearest instead of stochastic rounding"}
    assert found.kept == ((str(len(points) + 1), "not chosen"),)


def test_a_dry_run_before_training_takes_delayed_scales_for_trained(tmp_path: Path) -> None:
    model = qsim.convert(exported.tiny_llama(), qsim.recipes.fp8_hybrid(scaling.Delayed(4)), exclude=["lm_head"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match="servers merge model.layers.0.self_attn.q_proj"):
        found = qsim.export(model, tmp_path, dry_run=True)
    assert {row[2] for row in found.layers} == {"after a training step, which gives its delayed scales a history"}
    assert found.refused == ()
    assert len(str(found).splitlines()) == 8  # the layers of both blocks share rows
    assert all(map(torch.equal, state.values(), model.state_dict().values()))
    with pytest.raises(ValueError, match="the delayed scale of weight has no history yet: run a training step first"):
        qsim.export(model, tmp_path)
    model.train()(torch.arange(8)[None])
    with pytest.warns(UserWarning, match="servers merge"):
        assert {row[2] for row in qsim.export(model, tmp_path, dry_run=True).layers} == {""}
    e5m2 = FivePoint(weight=Quantizer("e5m2", scale=scaling.Delayed(4)))
    refused = qsim.export(qsim.convert(nn.Sequential(nn.Linear(4, 4)), e5m2), tmp_path, dry_run=True).refused
    assert refused[0][1].endswith("and the layout has E4M3, E2M3, E2M1 and integers of 4 and 8 bits")


def test_a_dry_run_knows_experts(tmp_path: Path) -> None:
    model = qsim.convert(exported.tiny_mixture(), "mxfp8", exclude=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what stays in high precision is in the table
        found = qsim.export(model, tmp_path, dry_run=True)
    assert sum("mlp.experts." in name for name, *_ in found.layers) == 6
    gate = "layouts hold linear layers, although products with it are rounded"
    assert found.kept == (("model.layers.0.mlp.gate", gate), ("lm_head", "not chosen"))
    stacks = qsim.export(model, tmp_path, "torchao", exclude="*.experts", dry_run=True)
    assert ("model.layers.0.mlp.experts", "excluded from the export") in stacks.kept


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_stacks_that_checkpoints_do_not_take_apart_are_refused(tmp_path: Path) -> None:
    model = qsim.convert(nn.Sequential(Stacked(), nn.Linear(4, 4)), FivePoint(weight=exported.FP8["tensor"].weight))
    found = qsim.export(model, tmp_path, dry_run=True)
    assert found.refused[0][0] == "0"
    assert found.refused[0][1].startswith("rounds products with weight, which checkpoints do not have as linear layers: exclude='0' writes")


@pytest.mark.parametrize(
    ("convert", "options", "error"),
    [
        ({}, {}, "convert the model first"),
        ({"": GRADIENTS}, {}, r"0 has the points grad=e5m2 \(2 modules in all\), which leave no low-precision numbers to write"),
        ({"0": GRADIENTS}, {}, "0 has the points grad=e5m2, which leave no low-precision numbers to write"),
        ({"": FivePoint(act="e4m3")}, {"weight_only": True}, "0 has the points act=e4m3 .2 modules in all., which leave no"),
        ({"": FivePoint(weight="e4m3")}, {"exclude": "*"}, "exclude matches all 2 modules that round"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_model_with_nothing_to_write_is_told_why(
    convert: dict[str, FivePoint], options: dict[str, Any], error: str, dry_run: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if convert:
        qsim.convert(model, {name or "*": points for name, points in convert.items()})
    with pytest.raises(ValueError, match=f"^export: no layer of the model rounds its weight or its input: {error}"):
        qsim.export(model, tmp_path / "out", dry_run=dry_run, **options)
    assert list(tmp_path.iterdir()) == []


class TestConvert:
    """`convert` does a dry run when it is given a layout."""

    def test_it_warns_of_layers_that_the_layout_cannot_express(self) -> None:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 32), nn.Linear(32, 2))
        said = r"convert: layout 'torchao' cannot express 0 \(2 layers in all\): its weight, e4m3 blocks.*; qsim.export\(…, dry_run=True\)"
        with pytest.warns(UserWarning, match=said):
            qsim.convert(model, "mxfp8", layout="torchao")

    def test_verbose_prints_all_layers(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            qsim.convert(model, "nvfp4", layout="compressed-tensors", example=torch.randn(2, 32), verbose=True)
        table = capsys.readouterr().out
        assert table.endswith(f"{qsim.export(model, 'out', example=torch.randn(2, 32), dry_run=True)}\n")

    def test_nvfp4_asks_for_an_example(self) -> None:
        with pytest.warns(UserWarning, match="convert: .* servers read from the checkpoint: give example=inputs, or weight_only=True"):
            qsim.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2)), "nvfp4", layout="compressed-tensors")

    def test_a_model_that_cannot_be_exported_is_converted(self) -> None:
        with pytest.warns(
            UserWarning, match="the model is converted, but cannot be exported as it is: export: the model is a single layer"
        ):
            model = qsim.convert(nn.Linear(4, 4), exported.FP8["tensor"], layout="torchao")
        assert isinstance(model, qsim.nn.Linear)

    def test_an_unknown_layout_is_refused_before_anything_is_converted(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(ValueError, match="convert: layout must be 'compressed-tensors' or 'torchao', got 'gguf'"):
            qsim.convert(model, exported.FP8["tensor"], layout="gguf")
        assert type(model[0]) is nn.Linear


def test_the_table_of_a_conversion_notes_blocks_that_do_not_divide_a_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 40), nn.Conv1d(40, 4, 1), nn.LazyLinear(4))
    qsim.convert(model, "mxfp4", exclude=["3"])
    note = "blocks of 32 do not divide its 50 inputs: checkpoints for servers have no smaller block at the end of a row"
    assert qsim.nn.conversion(model).notes == (("1", note),)
    assert qsim.nn.conversion(qsim.convert(model, {"1": qsim.recipes.nvfp4().points})).notes == (("1", note.replace("32", "16")),)
    assert qsim.nn.conversion(qsim.convert(model, {"1": qsim.recipes.fp8_blockwise().points})).notes == ()


def test_groups_that_do_not_divide_an_input_are_refused_before_servers_do(tmp_path: Path) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128)), qsim.recipes.fp8_blockwise().points)
    found = qsim.export(model, tmp_path / "out", dry_run=True)
    assert [name for name, *_ in found.layers] == ["0"]
    ((name, reason),) = found.refused
    assert (name, "has 64 columns, which blocks of 128 do not divide" in reason) == ("1", True)
    with pytest.raises(ValueError, match=r"cannot express 1: its input, .* has 64 columns, which blocks of 128 do not divide"):
        qsim.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_are_merged_before_an_export(tmp_path: Path) -> None:
    """PEFT's classes wrap layers, whose weights then have names that no server knows."""
    adapted = type("Adapted", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model = qsim.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
    model.append(adapted(32, 32))
    for dry_run in (True, False):
        with pytest.raises(TypeError, match=r"of PEFT \(peft.tuners.lora.layer.Adapted\).*: call model.merge_and_unload\(\) first"):
            qsim.export(model, tmp_path / "out", dry_run=dry_run)


def test_models_of_peft_are_exported_once_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model = qsim.convert(peft.get_peft_model(plain, config), "mxfp8")
    for dry_run in (True, False):
        with pytest.raises(TypeError, match=r"^export: the model has adapters of PEFT .*: call model.merge_and_unload\(\) first"):
            qsim.export(model, tmp_path / "out", dry_run=dry_run)
    merged = model.merge_and_unload()
    assert [name for name, *_ in qsim.export(merged, tmp_path / "out").layers] == ["0", "1"]
    loaded = qsim.load(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), tmp_path / "out")
    x = torch.randn(4, 32)
    assert torch.equal(loaded(x), merged(x))
