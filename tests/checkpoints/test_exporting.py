"""Exported weights are those that the forward pass multiplies, in real low-precision numbers, and nothing else is ever written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import qsim
from qsim import Block, FivePoint, Quantizer, scaling
from qsim.checkpoints import shards
from qsim.checkpoints.layouts import reciprocals
from qsim.checkpoints.layouts.weights import CodedWeight
from support import exported, layout_decoders

KINDS = {"fp8": exported.FP8, "integers": exported.INTEGERS, "blocks": exported.BLOCKS}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """The quantization config, the tensors and the header of a folder with one file."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    return json.loads((folder / "config.json").read_text())["quantization_config"], tensors, header


def decoded(folder: Path, name: str, prefix: str = "") -> Tensor:
    """The weight of a layer."""
    config, tensors, header = read(folder)
    own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.") and "bias" not in key}
    if config["quant_method"] == "torchao":
        return layout_decoders.torchao(header, name, own)
    groups = list(config["config_groups"].values())
    return layout_decoders.compressed_tensors(next(each for each in groups if name in each["targets"] or len(groups) == 1), own)


def forward_weight(layer: nn.Linear) -> Tensor:
    """The weight that a layer multiplies: its response to unit vectors."""
    points = FivePoint(weight=layer.points.weight)
    return qsim.nn.functional.linear(torch.eye(layer.in_features), layer.weight.detach().float(), None, points).T


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize("kind", KINDS)
def test_written_weights_are_those_of_the_forward_pass(kind: str, layout: str, tmp_path: Path) -> None:
    lacks = ("tiles", "int4 weights") if layout == "torchao" else ()
    points = {name: each for name, each in KINDS[kind].items() if name not in lacks}
    points |= exported.TORCHAO_ONLY if kind == "blocks" and layout == "torchao" else {}
    model = exported.model_of(points)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = qsim.export(model, tmp_path / "out", layout, weight_only=True)
    assert [name for name, _, _ in table.layers] == [str(i + 1) for i in range(len(points))]
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    for i, (name, each) in enumerate(points.items(), 1):
        found, wanted = decoded(tmp_path / "out", str(i)), exported.expected(model[i])
        is_reciprocal = layout == "compressed-tensors" and name == "nvfp4"
        note = table.layers[i - 1][2]
        assert note == {
            "stochastic": "nearest instead of stochastic rounding",
            "nvfp4": "to the bit in bfloat16: the layout stores the reciprocal of the tensor's scale" if is_reciprocal else "",
        }.get(name, ""), name
        dtype = torch.bfloat16 if is_reciprocal else torch.float32
        assert torch.equal(found.to(dtype), wanted.to(dtype)), name
        if name not in ("stochastic", "delayed"):
            # With two levels of scales the product of an element and its scale is rounded after it was multiplied by the second one.
            levels = 0.0 if each.weight.scale is None or each.weight.scale.outer is None else 2**-22
            assert torch.allclose(found, forward_weight(model[i]), rtol=levels, atol=0.0), name
    rest = read(tmp_path / "out")[1]
    for name in ("0.weight", "1.bias", f"{len(points) + 1}.weight"):
        assert torch.equal(rest[name], before[name])


def test_a_bfloat16_model_decodes_to_its_weights(tmp_path: Path) -> None:
    model = exported.model_of(exported.BLOCKS, dtype=torch.bfloat16)
    for layout in ("compressed-tensors", "torchao"):
        qsim.export(model, tmp_path / layout, layout, weight_only=True)
        for i in range(1, len(exported.BLOCKS) + 1):
            wanted = qsim.quantize(model[i].weight.detach(), model[i].points.weight.format, scale=model[i].points.weight.scale)
            assert torch.equal(decoded(tmp_path / layout, str(i)).bfloat16(), wanted)


def test_rows_and_blocks_at_the_edges(tmp_path: Path) -> None:
    points = {
        "tiles": FivePoint(weight=Block("e2m1", (16, 16), "e4m3", "fit", outer="PerTensor(format='e8m0', rule='ceil')")),
        "fp8": FivePoint(weight=Block("e4m3", (128, 128), rule="ceil")),
        "words": FivePoint(weight=Quantizer("int4", scale=scaling.PerRow())),
    }
    model = exported.model_of(points, rows=37, columns=112)
    qsim.export(model, tmp_path / "out")
    for i in (1, 2, 3):
        assert torch.equal(decoded(tmp_path / "out", str(i)), exported.expected(model[i]))


def test_blocks_along_another_dimension_are_written_along_that_of_the_product(tmp_path: Path) -> None:
    """The forward pass turns blocks to the dimension that it sums over, whatever dimension they are given."""
    model = exported.model_of({"turned": FivePoint(weight=Quantizer("e4m3", scale=scaling.PerBlock(32, dim=0)), weight_bwd=None)})
    qsim.export(model, tmp_path / "out", weight_only=True)
    assert torch.equal(decoded(tmp_path / "out", "1"), forward_weight(model[1]))


def arguments(points: FivePoint, folder: Path, **options: Any) -> dict[str, Any]:
    """The only group of a checkpoint in the layout of compressed-tensors."""
    qsim.export(exported.model_of({"": points}), folder, overwrite=True, **options)
    (group,) = read(folder)[0]["config_groups"].values()
    return group


@pytest.mark.parametrize(
    ("points", "format", "weights", "inputs"),
    [
        # The arguments of the library's presets FP8, FP8_DYNAMIC, FP8_BLOCK, INT8, MXFP8, MXFP4 and MXFP4A16.
        (exported.FP8["delayed"], "float-quantized", ("float", 8, "tensor", None), ("float", 8, "tensor", None, False)),
        (exported.FP8["channel"], "float-quantized", ("float", 8, "channel", None), ("float", 8, "token", None, True)),
        (qsim.recipes.fp8_blockwise().points, "float-quantized", ("float", 8, "block", [128, 128]), ("float", 8, "group", 128, True)),
        (qsim.recipes.int8().points, "int-quantized", ("int", 8, "channel", None), ("int", 8, "token", None, True)),
        (qsim.recipes.mxfp8().points, "mxfp8-quantized", ("float", 8, "group", 32), ("float", 8, "group", 32, True)),
        (exported.BLOCKS["mxfp4"], "mxfp4-pack-quantized", ("float", 4, "group", 32), ("float", 4, "group", 32, True)),
        (FivePoint(weight="mxfp4"), "mxfp4-pack-quantized", ("float", 4, "group", 32), None),
        (qsim.recipes.fp8_hybrid().points, "float-quantized", ("float", 8, "tensor", None), ("float", 8, "tensor", None, True)),
    ],
)
def test_the_arguments_are_those_of_the_librarys_presets(
    points: FivePoint, format: str, weights: tuple[Any, ...], inputs: tuple[Any, ...] | None, tmp_path: Path
) -> None:
    def facts(args: dict[str, Any]) -> tuple[Any, ...]:
        assert args["symmetric"] is True
        return args["type"], args["num_bits"], args["strategy"], args.get("group_size", args.get("block_structure"))

    group = arguments(points, tmp_path / "out")
    assert group["targets"] == ["Linear"]
    assert group["format"] == format
    assert facts(group["weights"]) == weights
    assert group["weights"]["dynamic"] is False
    assert (group["input_activations"] and (*facts(group["input_activations"]), group["input_activations"]["dynamic"])) == inputs
    for args in (group["weights"], group["input_activations"] or {}):
        assert args.get("scale_dtype") == ("torch.uint8" if format.startswith("mx") and args else None)


def test_scales_of_inputs_that_are_known_are_written(tmp_path: Path) -> None:
    model = exported.model_of({name: exported.FP8[name] for name in ("no scale", "given", "delayed")})
    qsim.export(model, tmp_path / "fp8")
    config, tensors, _ = read(tmp_path / "fp8")
    assert len(config["config_groups"]) == 1
    assert config["ignore"] == ["4"]
    assert not any("amaxes" in name for name in tensors)
    assert arguments(FivePoint(Block("e2m1", 16, "e4m3", "fit"), exported.BLOCKS["nvfp4"].weight), tmp_path / "alone")["input_activations"]
    assert read(tmp_path / "alone")[1]["1.input_global_scale"].item() == 1.0
    scales = [tensors[f"{i}.input_scale"].item() for i in (1, 2, 3)]
    assert scales == [1.0, torch.tensor(0.03).item(), (model[3].act_amaxes.amax() / 448).item()]

    nvfp4 = exported.model_of({"": exported.BLOCKS["nvfp4"]}, rows=128).train()
    inputs = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    qsim.export(nvfp4, tmp_path / "nvfp4", example=inputs)
    config, tensors, _ = read(tmp_path / "nvfp4")
    seen = nn.functional.layer_norm(inputs, (128,)).abs().amax()
    assert torch.allclose(tensors["1.input_global_scale"], 448 * 6 / seen.view(1))
    assert nvfp4.training
    assert config["format"] == "nvfp4-pack-quantized"
    args = config["config_groups"]["group_0"]["input_activations"]
    assert (args["strategy"], args["group_size"], args["dynamic"]) == ("tensor_group", 16, "local")


def test_torchao_rounds_inputs_as_the_points_do(tmp_path: Path) -> None:
    model = exported.model_of({"mxfp8": qsim.recipes.mxfp8().points, "int8": qsim.recipes.int8().points, "": exported.FP8["channel"]})
    qsim.export(model, tmp_path / "out", "torchao")
    config, _, header = read(tmp_path / "out")
    kwargs = [json.loads(header[f"{i}.weight"])["_data"]["act_quant_kwargs"] for i in (1, 2, 3)]
    assert kwargs[0]["_data"]["scaling_mode"] == {"_type": "ScaleCalculationMode", "_data": "RCEIL"}
    assert [each["_data"]["granularity"]["_type"] for each in kwargs[1:]] == ["PerRow", "PerRow"]
    assert config["quant_type"]["default"]["_type"] == "FqnToConfig"
    assert list(config["quant_type"]["default"]["_data"]["fqn_to_config"]) == ["1", "2", "3"]
    assert json.loads(header["tensor_names"])[:3] == ["1.weight", "2.weight", "3.weight"]


@pytest.mark.parametrize(
    ("points", "layout", "error"),
    [
        (exported.TORCHAO_ONLY["e5m2"], "compressed-tensors", "its weight is Float.5, 2, .* the layout has .*; layout='torchao' can"),
        (FivePoint(weight="bf16"), "torchao", "its weight is bf16 given.* and the layout has float8 .*; no other layout can"),
        (exported.FP8["tiles"], "torchao", r"tiles\(64, 32\), has shape \(96, 128\), which tiles of 64 × 32 do not divide; layout='comp"),
        (FivePoint(weight=Block("e4m3", 48, "fp32", "fit")), "compressed-tensors", "128 columns, which blocks of 48 do not divide"),
        (
            FivePoint(weight=Block("e2m1", 32, outer=scaling.PerTensor(margin=40))),
            "compressed-tensors",
            "must have E8M0 scales .*; no other layout can",
        ),
        (
            FivePoint(Quantizer("e4m3", scale=scaling.PerTensor(margin=1)), "e4m3"),
            "compressed-tensors",
            "scales that servers do not compute",
        ),
        (FivePoint(Block("e4m3", 16, "e4m3"), "e4m3"), "compressed-tensors", "scales that servers do not compute; weight_only"),
        (
            FivePoint(Quantizer("e4m3", scale=scaling.PerTensor("e8m0", "ceil")), "e4m3"),
            "torchao",
            "float8 with the granularity of the weight",
        ),
        (FivePoint(weight=Block("e2m1", 8)), "compressed-tensors", r"must have E8M0 scales per 32 \(MX formats\).*; no other layout can"),
        (FivePoint(act="e4m3"), "torchao", "its point weight is None: there are no low-precision numbers to write; no other"),
        (FivePoint(act=Quantizer("e4m3", "stochastic"), weight="e4m3"), "compressed-tensors", "weight_only=True omits it"),
        (FivePoint(act="e4m3", weight="e4m3"), "torchao", "its input is act=e4m3, and .*; layout='compressed-tensors' can"),
        (FivePoint("mxfp4", exported.FP8["tensor"].weight), "torchao", "its input is act=mxfp4, .* with the granularity of the weight"),
        (exported.BLOCKS["nvfp4"], "compressed-tensors", "give example=inputs, or weight_only=True; layout='torchao' can"),
        (FivePoint("mxfp8", "mxfp4"), "torchao", "the layout has inputs in the MX format of the weight"),
        (FivePoint("e4m3", exported.INTEGERS["int8"].weight), "torchao", "the layout has INT8 with the granularity of the weight"),
        (FivePoint("e4m3", exported.BLOCKS["nvfp4"].weight), "torchao", "and the layout has NVFP4; weight_only"),
        (FivePoint(Block("e4m3", (2, 2)), "e4m3"), "compressed-tensors", "has scales that servers do not compute; weight_only"),
        (
            FivePoint(weight=Quantizer("int8", scale=scaling.PerBlock(32))),
            "torchao",
            "the layout has INT8 with a scale per tensor or per row",
        ),
    ],
)
def test_what_a_layout_cannot_express_is_refused_before_anything_is_written(
    points: FivePoint, layout: str, error: str, tmp_path: Path
) -> None:
    model = exported.model_of({"": points})
    with pytest.raises(ValueError, match=f"export: layout '{layout}' cannot express 1: .*{error}"):
        qsim.export(model, tmp_path / "out", layout)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_no_layout_holds_are_refused(tmp_path: Path) -> None:
    def refused(model: nn.Module, error: str, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=error):
            qsim.export(model, tmp_path / "out", **options)
        assert list(tmp_path.iterdir()) == []

    fp8 = exported.FP8["tensor"]
    hadamard = Quantizer("mxfp4", transform=qsim.transforms.Hadamard(32))

    def alone(layer: nn.Module, points: FivePoint) -> nn.Module:
        return qsim.convert(nn.Sequential(layer), points)

    refused(nn.Linear(4, 4), "export: no layer of the model rounds its weight or its input: convert the model first")
    refused(qsim.convert(nn.Linear(4, 4), fp8), "the model is a single layer, which has no name in a checkpoint: put it into a torch.nn")
    refused(alone(nn.Conv1d(4, 4, 1), fp8), "cannot express 0: it is a Conv1d, and layouts hold linear layers")
    refused(alone(nn.Linear(32, 4), FivePoint(hadamard, hadamard)), r"its weight is rounded after a transform, Hadamard\(size=32")
    refused(alone(nn.Linear(4, 4).double(), fp8), "its weight is float64, and layouts decode in float32")
    refused(alone(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), fp8), "computed by a parametrization: call torch.nn")
    refused(alone(nn.Linear(4, 4), exported.FP8["delayed"]), "the delayed scale of weight has no history yet: run a training step")
    refused(alone(nn.Linear(4, 4), fp8), "layout must be 'compressed-tensors' or 'torchao', got 'gguf'", layout="gguf")
    rooted = alone(nn.Linear(4, 4), fp8)
    rooted.register_parameter("token", nn.Parameter(torch.zeros(4)))
    refused(rooted, "layout 'torchao' cannot express the model: the model itself has the tensor token", layout="torchao")
    broken = qsim.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fp8)
    with torch.no_grad():
        broken[1].weight[0, 0] = torch.inf
    refused(broken, "export: 1 has a weight that is not finite")


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exported.model_of(exported.INTEGERS)
    add = shards.ShardWriter.add

    def interrupted(self: shards.ShardWriter, name: str, tensor: Tensor) -> None:
        if name.startswith("3"):
            raise KeyboardInterrupt
        add(self, name, tensor)

    monkeypatch.setattr(shards.ShardWriter, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qsim.export(model, tmp_path / "out", max_shard_size="1KB")
    assert list(tmp_path.iterdir()) == []


def test_layers_kept_in_high_precision_are_ignored_by_servers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 2))
    qsim.convert(model, "nvfp4", exclude=["0"])
    table = qsim.export(model, tmp_path / "out", weight_only=True)
    assert [name for name, *_ in table.layers] == ["1"]
    config, tensors, _ = read(tmp_path / "out")
    assert config["ignore"] == ["0", "2"]
    assert torch.equal(tensors["2.weight"], model[2].weight)
    assert str(table).startswith("1  written  weight=e2m1 tiles(16, 16, e4m3, under tensor)")


@pytest.mark.parametrize("seed", range(3))
def test_reciprocals_give_the_same_weights(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    elements = layout_decoders.E2M1[1:8]
    exact = 0
    for outer in torch.exp2(torch.randn(40, generator=generator) * 8):
        coded = CodedWeight(torch.zeros(1, 16), scales, None, outer, (1, 16))
        divisor, dtype = reciprocals.reciprocal(coded, scales)
        wanted, found = (scales.view(-1, 1) * outer) * elements, (scales.view(-1, 1) / divisor) * elements
        assert torch.equal(found.to(getattr(torch, dtype)), wanted.to(getattr(torch, dtype)))
        exact += dtype == "float32"
    assert exact < 40
    power = CodedWeight(torch.zeros(1, 16), scales, None, torch.tensor(2.0**-40), (1, 16))
    assert reciprocals.reciprocal(power, scales) == (torch.tensor(2.0**40), "float32")


def test_a_scale_without_a_usable_reciprocal_is_refused() -> None:
    scales = torch.ones(1, 1)
    tiny = CodedWeight(torch.zeros(1, 16), scales, None, torch.tensor(1e-40), (1, 16))
    with pytest.raises(ValueError, match=r"whose reciprocal, which this layout stores, gives other weights: scales that are powers of two"):
        reciprocals.reciprocal(tiny, scales)


def test_excluded_layers_are_written_in_high_precision(tmp_path: Path) -> None:
    model = qsim.convert(nn.Sequential(nn.Conv1d(32, 32, 1), nn.Linear(32, 32), nn.Linear(32, 32)), "mxfp8")
    with pytest.raises(
        ValueError, match="export: layout 'compressed-tensors' cannot express 0: it is a Conv1d, and layouts hold linear layers"
    ):
        qsim.export(model, tmp_path / "out")
    with pytest.raises(ValueError, match="export: exclude pattern 'conv' matches no module"):
        qsim.export(model, tmp_path / "out", exclude="conv")
    with pytest.raises(TypeError, match="export: exclude must be a pattern of names, several patterns or None, got 0"):
        qsim.export(model, tmp_path / "out", exclude=0)  # type: ignore[arg-type]
    assert [name for name, _, _ in qsim.export(model, tmp_path / "out", exclude=["0", "2"]).layers] == ["1"]
    loaded = qsim.load(nn.Sequential(nn.Conv1d(32, 32, 1), nn.Linear(32, 32), nn.Linear(32, 32)), tmp_path / "out")
    assert torch.equal(loaded[2].weight, model[2].weight)


def test_a_margin_of_scales_is_that_of_the_exported_numbers(tmp_path: Path) -> None:
    """With a margin, the largest number of a row is a quarter of the format's largest, in the file as in the model."""
    point = Quantizer("int8", scale=scaling.PerAxis(0, margin=2))
    model = exported.model_of({"": FivePoint(weight=point)})
    qsim.export(model, tmp_path / "out")
    loaded = qsim.load(exported.model_of({"": FivePoint()}), tmp_path / "out", convert=False)
    weight = model.get_parameter("1.weight")
    assert torch.equal(loaded.get_parameter("1.weight"), point(weight))
    assert not torch.equal(point(weight), Quantizer("int8", scale=scaling.PerAxis(0))(weight))


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "ceil_log2"])
def test_the_rule_of_scales_of_inputs_comes_back(rule: str, tmp_path: Path) -> None:
    block = Block("e4m3", 32, rule=rule)
    qsim.export(exported.model_of({"": FivePoint(block, block)}), tmp_path / "out", "torchao")
    (tmp_path / "out" / "qsim.json").unlink()  # as another program would write it
    (points,) = qsim.checkpoints.points(tmp_path / "out").values()
    assert points.act == FivePoint(block, block).act


def test_rows_of_a_coded_weight_keep_their_scales() -> None:
    codes, scales = torch.arange(32, dtype=torch.uint8).view(8, 4), torch.arange(4.0).view(4, 1)
    whole = CodedWeight(codes, scales, scales.byte(), torch.tensor(2.0), (2, 4))
    part = whole.part(range(4, 8))
    assert torch.equal(part.codes, codes[4:])
    assert part.scales.tolist() == [[2.0], [3.0]]
    assert part.scale_codes is not None
    assert part.scale_codes.tolist() == [[2], [3]]
    assert (part.outer, part.tile) == (whole.outer, (2, 4))
    assert whole.part(range(6, 7)).tile == (1, 4)
    assert whole.part(range(6, 7)).scales.tolist() == [[3.0]]
