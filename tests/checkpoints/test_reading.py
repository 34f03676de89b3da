"""Exported checkpoints are read again: the weights to the bit, and points for a conversion."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import qsim
from qsim import FivePoint, Quantizer, scaling
from support import exported
from support.points import in_order

KINDS = {"fp8": exported.FP8, "integers": exported.INTEGERS, "blocks": exported.BLOCKS}


def plain(model: nn.Sequential) -> nn.Sequential:
    """A model of the same architecture with other weights."""
    torch.manual_seed(9)
    layers = [nn.Linear(layer.in_features, layer.out_features, layer.bias is not None) for layer in model[1:]]
    return nn.Sequential(nn.LayerNorm(model[0].normalized_shape), *layers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_are_those_of_the_forward_pass(kind: str, layout: str, tmp_path: Path) -> None:
    lacks = ("tiles", "int4 weights") if layout == "torchao" else ()
    points = {name: each for name, each in KINDS[kind].items() if name not in lacks}
    points |= exported.TORCHAO_ONLY if kind == "blocks" and layout == "torchao" else {}
    model = exported.model_of(points)
    qsim.export(model, tmp_path, layout, weight_only=True, max_shard_size="20KB")
    loaded = qsim.load(plain(model), tmp_path)
    for i, name in enumerate(points, 1):
        # The layout of compressed-tensors has the reciprocal of a tensor's scale.
        exact = layout == "torchao" or name != "nvfp4"
        assert torch.allclose(loaded[i].weight, exported.expected(model[i]), rtol=0.0 if exact else 2**-22, atol=0.0), name
        assert type(loaded[i]) is nn.Linear  # only weights were rounded, and they are rounded already
    assert torch.equal(loaded[1].bias, model[1].bias)
    assert qsim.checkpoints.points(tmp_path) == {str(i): each for i, each in enumerate(points.values(), 1)}
    (tmp_path / "qsim.json").unlink()
    found = qsim.checkpoints.points(tmp_path)
    for i, each in enumerate(points.values(), 1):
        assert found[str(i)].weight.format.bits == each.weight.format.bits
        assert found[str(i)].act is None
    assert torch.equal(qsim.load(plain(model), tmp_path)[1].weight, loaded[1].weight)


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_a_loaded_export_gives_the_same_outputs(layout: str, tmp_path: Path) -> None:
    """With scales of blocks, which are part of the operands, all products are the same."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 2))
    qsim.convert(model, "mxfp8", exclude=["3"])
    qsim.export(model, tmp_path, layout)
    x = torch.randn(5, 64)
    loaded = qsim.load(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 2)), tmp_path)
    assert loaded[0].points == FivePoint(act=qsim.recipes.mxfp8().points.act, act_bwd=None)
    assert torch.allclose(loaded(x), model(x), rtol=1e-6, atol=1e-7)
    with pytest.warns(UserWarning, match="load: inputs are rounded in 2 layers of the exported model, and with convert=False this model"):
        assert qsim.load(qsim.revert(loaded), tmp_path, convert=False) is loaded
    assert type(loaded[0]) is nn.Linear
    # Converted with the points of the checkpoint, it trains on, and its weights do not move.
    qsim.convert(loaded, qsim.checkpoints.points(tmp_path))
    assert loaded[0].points == model[0].points
    assert torch.allclose(loaded(x), model(x), rtol=1e-6, atol=1e-7)


def test_static_scales_and_descriptions_by_others(tmp_path: Path) -> None:
    model = exported.model_of({name: exported.FP8[name] for name in ("delayed", "channel", "tiles")})
    qsim.export(model, tmp_path)
    scale = scaling.Given((model[1].act_amaxes.amax() / 448).item())
    loaded = qsim.load(plain(model), tmp_path).eval()
    assert loaded[1].points == FivePoint(act=Quantizer("e4m3", scale=scale), act_bwd=None)
    assert loaded[3].points == FivePoint(act=exported.FP8["tiles"].act, act_bwd=None)
    (tmp_path / "qsim.json").unlink()
    found = qsim.checkpoints.points(tmp_path)
    assert found["1"] == FivePoint(Quantizer("e4m3", scale=scale), Quantizer("e4m3", scale="tensor"), weight_bwd="same", act_bwd=None)
    assert found["2"] == in_order(*[Quantizer("e4m3", scale=scaling.PerRow())] * 2)
    assert found["3"] == FivePoint(
        Quantizer("e4m3", scale=scaling.PerBlock(64)), Quantizer("e4m3", scale=scaling.PerTile(64, 32)), act_bwd=None, weight_bwd=None
    )
    # Groups of other programs name layers by expressions.
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [rf"re:^{name}$" for name in group["targets"]]
    path.write_text(json.dumps(config))
    assert qsim.checkpoints.points(tmp_path) == found


def test_a_narrow_model_is_warned_of(tmp_path: Path) -> None:
    model = exported.model_of({"": exported.FP8["channel"], "mxfp8": exported.BLOCKS["mxfp8"]})
    qsim.export(model, tmp_path)
    with pytest.raises(ValueError, match=r"model.to\(torch.float32\) first"):  # tensors in high precision keep their dtype
        qsim.load(plain(model).bfloat16(), tmp_path)
    narrow = exported.model_of({"": exported.FP8["channel"], "mxfp8": exported.BLOCKS["mxfp8"]}, dtype=torch.bfloat16)
    qsim.export(narrow, tmp_path / "narrow")
    with pytest.warns(UserWarning, match=r"load: 1.weight were rounded to the model's dtype, torch.bfloat16; a float32 model holds them"):
        qsim.load(plain(narrow).bfloat16(), tmp_path / "narrow")


def test_numbers_that_qsim_does_not_have_are_refused(tmp_path: Path) -> None:
    def checkpoint(name: str, quantization: dict[str, Any], tensors: dict[str, torch.Tensor], header: dict[str, str]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        save_file(tensors, folder / "model.safetensors", header)
        return folder

    def refused(folder: Path, error: str) -> None:
        with pytest.raises(ValueError, match=error):
            qsim.checkpoints.points(folder)

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    tensors = {"0.weight": torch.zeros(2, 4, dtype=torch.int8), "0.weight_scale": torch.ones(2, 1)}

    def groups(**changed: Any) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": weights | changed, "format": "int-quantized"}
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}

    refused(checkpoint("zero", groups(), tensors | {"0.weight_zero_point": torch.zeros(2, 1)}, {}), "0 has zero points .*weight_zero_point")
    refused(checkpoint("asymmetric", groups(symmetric=False), tensors, {}), "0 has zero points or an order of its columns")
    refused(checkpoint("bits", groups(num_bits=3), tensors, {}), "numbers of type int with 3 bits, which qsim does not read")
    refused(checkpoint("strategy", groups(strategy="attn_head"), tensors, {}), "scales with the strategy 'attn_head'")
    other = groups()
    other["config_groups"]["group_0"]["targets"] = ["Embedding"]
    refused(checkpoint("target", other, tensors, {}), "no group of the quantization_config describes 0")
    refused(checkpoint("method", {"quant_method": "gptq"}, tensors, {}), "no quantization_config by compressed-tensors or torchao")
    facts = {"_type": "MXTensor", "_data": {"is_swizzled_scales": True}, "_tensor_data_names": ["qdata", "scale"]}
    header = {"tensor_names": '["0.weight"]', "0.weight": json.dumps(facts)}
    zeros = {"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale", "zero_point"]}
    parts = {"0._weight_qdata": tensors["0.weight"], "0._weight_scale": torch.ones(2), "0._weight_zero_point": torch.ones(2)}
    of_zeros = {"tensor_names": '["0.weight"]', "0.weight": json.dumps(zeros)}
    refused(checkpoint("torchao's zeros", {"quant_method": "torchao"}, parts, of_zeros), "0 has zero points, which qsim does not read")
    rule = {"_data": {"scaling_mode": {"_data": "NEW"}}}
    scaled = {"_type": "MXTensor", "_data": {"act_quant_kwargs": rule, "block_size": 32}, "_tensor_data_names": ["qdata", "scale"]}
    of_rule = {"tensor_names": '["0.weight"]', "0.weight": json.dumps(scaled)}
    refused(
        checkpoint("rule", {"quant_method": "torchao"}, parts, of_rule), "inputs have scales by torchao's rule NEW, which qsim does not"
    )
    refused(checkpoint("swizzled", {"quant_method": "torchao"}, tensors, header), "0 is a MXTensor of qdata, scale, .* swizzled scales")
