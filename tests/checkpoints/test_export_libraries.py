"""The libraries whose layouts are written open them, and decode the weights of the forward pass to the bit.

Skipped where they are not installed: they are not among the packages that the tests need. Last run with compressed-tensors 0.20.0, torchao
0.18.0 and transformers 5.23.0, on torch 2.13.0.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import qsim
from qsim import FivePoint
from support import exported

KINDS = {"fp8": exported.FP8, "integers": exported.INTEGERS, "blocks": exported.BLOCKS}


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    return json.loads((folder / "config.json").read_text())["quantization_config"], tensors, header


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_tensors_decodes_the_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = exported.model_of(KINDS[kind], rows=128)
    qsim.export(model, tmp_path / "out", example=torch.randn(4, 128))
    facts, tensors, _ = written(tmp_path / "out")
    config = QuantizationConfig.model_validate(facts)
    for name in map(str, range(1, len(KINDS[kind]) + 1)):
        scheme = next(group for group in config.config_groups.values() if name in group.targets)
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.") and "bias" not in key}
        compressor = BaseCompressor.get_value_from_registry(getattr(scheme.format, "value", scheme.format))
        found = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(found, exported.expected(model[int(name)], found.dtype)), name


@pytest.mark.parametrize("name", ["tensor", "tiles", "delayed", "mxfp8", "mxfp4", "nvfp4 of powers"])
def test_compressed_tensors_decodes_experts(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    points = (exported.FP8 | exported.BLOCKS)[name]
    model = qsim.convert(exported.tiny_mixture(), {"*.experts": points})
    model(torch.arange(8)[None])  # gives delayed scales a history
    qsim.export(model, tmp_path / "out")
    facts, tensors, _ = written(tmp_path / "out")
    (scheme,) = QuantizationConfig.model_validate(facts).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(getattr(scheme.format, "value", scheme.format))
    for i in range(2):
        gate, up = exported.expected_of_expert(model, i, points).split(64)
        down = exported.expected_of_expert(model, i, points, "down_proj")
        for part, rows in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            prefix = f"model.layers.0.mlp.experts.{i}.{part}."
            own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            found = compressor.decompress(own, scheme)["weight"]
            assert torch.equal(found, rows.to(found.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_torchao_decodes_the_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.core.config import config_from_dict
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    points = dict(KINDS[kind]) | (exported.TORCHAO_ONLY if kind == "blocks" else {})
    points = {name: each for name, each in points.items() if name not in ("tiles", "int4 weights")}
    # Inputs that the layout cannot express are left out, all others are kept.
    alone = ("no scale", "given", "delayed", "mxfp4 tiles")
    points |= {name: FivePoint(weight=points[name].weight, weight_bwd=None) for name in alone if name in points}
    model = exported.model_of(points, dtype=torch.bfloat16)
    qsim.export(model, tmp_path / "out", "torchao")
    facts, tensors, header = written(tmp_path / "out")
    config_from_dict(facts["quant_type"]["default"])
    state, left = unflatten_tensor_state_dict(tensors, header)
    assert left == {}
    for i in range(1, len(points) + 1):
        assert torch.equal(state[f"{i}.weight"].dequantize(torch.float32), exported.expected(model[i]))


@pytest.mark.parametrize("name", ["tensor", "channel", "tiles", "delayed", "mxfp8", "mxfp4", "nvfp4", "int8"])
def test_torchao_decodes_experts(name: str, tmp_path: Path) -> None:
    """In their stacks, which transformers loads as well."""
    pytest.importorskip("torchao")
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from transformers import AutoModelForCausalLM

    points = FivePoint(weight=(exported.FP8 | exported.BLOCKS | exported.INTEGERS)[name].weight, weight_bwd=None)
    model = qsim.convert(exported.tiny_mixture().bfloat16(), {"*.experts": points})
    model(torch.arange(8)[None])  # gives delayed scales a history
    qsim.export(model, tmp_path / "out", "torchao")
    _, tensors, header = written(tmp_path / "out")
    state, left = unflatten_tensor_state_dict(tensors, header)
    assert left == {}
    found = state["model.layers.0.mlp.experts.gate_up_proj"].dequantize(torch.float32)
    expected = torch.stack([exported.expected_of_expert(model, i, points) for i in range(2)])
    assert torch.equal(found, expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.model.layers[0].mlp.experts.gate_up_proj.dequantize(torch.float32), expected)


@pytest.mark.parametrize(("layout", "package"), [("compressed-tensors", "compressed_tensors"), ("torchao", "torchao")])
def test_transformers_loads_an_exported_model(layout: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    from transformers import AutoModelForCausalLM

    model = exported.tiny_llama()
    qsim.convert(model, {"model.layers.0": qsim.recipes.int8().points, "*": exported.FP8["channel"]}, exclude=["lm_head"])
    qsim.export(model, tmp_path / "out", layout, max_shard_size="50KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        served = loaded(tokens).logits  # compressed-tensors decodes with the first call
    assert torch.isfinite(served).all()
    for name, layer in model.named_modules():
        if isinstance(layer, qsim.nn.Linear):
            weight = loaded.get_submodule(name).weight
            found = weight.dequantize() if layout == "torchao" else weight
            assert torch.equal(found.float(), exported.expected(layer)), name
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize(("layout", "package"), [("compressed-tensors", "compressed_tensors"), ("torchao", "torchao")])
def test_transformers_loads_a_tied_head_that_was_rounded(layout: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    from transformers import AutoModelForCausalLM

    model, tokens = qsim.convert(exported.tiny_llama(), exported.FP8["channel"]), torch.arange(12).view(1, 12)
    qsim.export(model, tmp_path / "out", layout)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    head = loaded.lm_head.weight
    assert torch.equal((head.dequantize() if layout == "torchao" else head).float(), exported.expected(model.lm_head))
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
