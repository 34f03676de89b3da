"""GPT-2 in low precision: `Conv1D`, whose weight is the transpose of a linear layer's, and a head that is tied to the embedding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.checkpoints.folders import DESCRIPTION
from support import exported, layout_decoders

TOKENS = torch.arange(16)[None]
RECIPES = {
    "fp8_hybrid": qsim.recipes.fp8_hybrid(),
    "rows": qsim.recipes.fp8_hybrid(scaling.PerRow()),
    "delayed": qsim.recipes.fp8_hybrid(scaling.Delayed(4)),
    "tiles": FivePoint(weight=exported.FP8["tiles"].weight),
    "int8": qsim.recipes.int8(),
    "int4": exported.INTEGERS["int4 weights"],
    "mxfp8": qsim.recipes.mxfp8(),
    "mxfp6": exported.BLOCKS["mxfp6"],
    "mxfp4": qsim.recipes.mxfp4(),
    "nvfp4": qsim.recipes.nvfp4(outer=scaling.PerTensor("e8m0", "ceil")),
}
COMPRESSED_ONLY = ("delayed", "tiles", "int4")


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 96, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()


def converted(recipe: str, **options: Any) -> nn.Module:
    model = qsim.convert(gpt2(), RECIPES[recipe], **options)
    model.train()(TOKENS)  # gives delayed scales a history
    return model.eval()


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    return json.loads((folder / "config.json").read_text()), tensors, header


def decoded(folder: Path, name: str) -> Tensor:
    """The weight of a `Conv1D` as that of a linear layer, with vLLM's rule: tensors with the name of the parameter are transposed."""
    config, tensors, header = stored(folder)
    own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.") and "bias" not in key}
    if config["quantization_config"]["quant_method"] == "torchao":
        return layout_decoders.torchao(header, name, own)
    own = {key: tensor.t() if key == "weight" else tensor for key, tensor in own.items()}
    (group,) = config["quantization_config"]["config_groups"].values()
    return layout_decoders.compressed_tensors(group, own)


def as_linear(layer: nn.Module) -> nn.Module:
    """A `Conv1D` as a linear layer with the same points and histories."""
    linear = qsim.nn.Linear(*layer.weight.shape, points=layer.points)
    linear.weight = nn.Parameter(layer.weight.detach().t())
    for name, buffer in layer.named_buffers():
        setattr(linear, name, buffer)
    return linear


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_conv1d_is_exported_as_a_linear_layer(recipe: str, layout: str, tmp_path: Path) -> None:
    if layout == "torchao" and recipe in COMPRESSED_ONLY:
        pytest.skip("not in this layout")
    model = converted(recipe, exclude=["lm_head"])
    table = qsim.export(model, tmp_path, layout, example=TOKENS)
    layers = [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert [row[0] for row in table.layers] == layers
    assert all(row[2].startswith("for servers and qsim.load: transformers does not decode Conv1D") for row in table.layers)
    for name in layers:
        assert torch.equal(decoded(tmp_path, name), exported.expected(as_linear(model.get_submodule(name)))), name
    loaded = qsim.load(gpt2(), tmp_path)
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    if recipe in ("fp8_hybrid", "mxfp4"):  # the checkpoints of others lack qsim's description
        (tmp_path / DESCRIPTION).unlink()
        torch.testing.assert_close(qsim.load(gpt2(), tmp_path)(TOKENS).logits, loaded(TOKENS).logits)


def test_points_of_an_exported_conv1d_train_on(tmp_path: Path) -> None:
    model = converted("mxfp8", exclude=["lm_head"])
    qsim.export(model, tmp_path)
    again = qsim.convert(qsim.load(gpt2(), tmp_path), qsim.checkpoints.points(tmp_path))
    assert qsim.nn.conversion(again) == qsim.nn.conversion(model)


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_a_tied_head_that_rounds_has_a_weight_of_its_own(layout: str, tmp_path: Path) -> None:
    model = converted("fp8_hybrid")
    assert model.lm_head.weight is model.transformer.wte.weight
    table = qsim.export(model, tmp_path, layout)
    assert table.layers[-1] == (
        "lm_head", "weight=e4m3 tensor, act=e4m3 tensor", "untied from transformer.wte.weight, which stays in high precision",
    )  # fmt: skip
    config, tensors, _ = stored(tmp_path)
    assert config["tie_word_embeddings"] is False
    assert torch.equal(tensors["transformer.wte.weight"], model.transformer.wte.weight)
    untied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    torch.testing.assert_close(qsim.load(untied, tmp_path)(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(untied.lm_head.weight, exported.expected(model.lm_head))
    assert model.config.tie_word_embeddings
    tied = gpt2()
    before = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"load: lm_head.weight is transformer.wte.weight in the model, and the checkpoint has two tensors"
    ):
        qsim.load(tied, tmp_path)
    assert all(map(torch.equal, before.values(), tied.state_dict().values()))


def test_a_tied_head_that_does_not_round_stays_tied(tmp_path: Path) -> None:
    qsim.export(converted("fp8_hybrid"), tmp_path, exclude="lm_head")
    config, tensors, _ = stored(tmp_path)
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_layers_that_share_a_weight_and_round_it_alike_are_each_written(tmp_path: Path) -> None:
    points = FivePoint(weight=Quantizer("e4m3", scale="tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    table = qsim.export(qsim.convert(model, points), tmp_path)
    assert table.layers == (("0", "weight=e4m3 tensor", ""), ("1", "weight=e4m3 tensor", ""))
    loaded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loaded[1].weight = loaded[0].weight
    x = torch.randn(3, 8)
    torch.testing.assert_close(qsim.load(loaded, tmp_path)(x), model(x))
    mixed = qsim.convert(model, {"1": FivePoint(weight=Quantizer("int8", scale="tensor"))})
    qsim.export(mixed, tmp_path, overwrite=True)
    with pytest.raises(ValueError, match=r"load: 1.weight is 0.weight in the model, and the checkpoint has two tensors"):
        qsim.load(loaded, tmp_path)
