"""`save_pretrained` writes a model's conversion, and `from_pretrained` repeats it."""

import copy
import json
import logging
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers import auto
from transformers.trainer_utils import validate_quantization_for_training

import qsim
import qsim.hugging_face
from qsim import Block, FivePoint, Quantizer, scaling
from qsim.checkpoints.folders import DESCRIPTION
from qsim.nn.product import observers
from support import exported, layout_decoders
from support.points import in_order

NOISY = FivePoint(Quantizer("e4m3", "stochastic"), Quantizer("e4m1", "stochastic"), grad="e5m2", act_bwd=None, weight_bwd=None)
DELAYED = in_order(*[Quantizer("e4m3", scale=scaling.Delayed(4))] * 2)


def converted() -> nn.Module:
    model = exported.tiny_llama().train()
    qsim.convert(model, {"*.mlp": DELAYED, "model.layers": NOISY}, exclude=["lm_head"])
    step(model)
    return model


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(5)
    tokens = torch.arange(20).view(2, 10)
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_from_pretrained_converts_again_and_computes_the_same_bits(tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "qsim"
    assert FivePoint.from_dict(config["points"][config["layers"]["model.layers.0.mlp.up_proj"]["points"]]) == DELAYED
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert qsim.nn.conversion(loaded) == qsim.nn.conversion(model)
    assert all(map(torch.equal, step(model.eval()), step(loaded.eval())))
    assert all(map(torch.equal, step(model.train()), step(loaded.train())))
    # It is a model like any other: it trains, changes its dtype and is saved again.
    validate_quantization_for_training(loaded)
    assert loaded.half().dtype == torch.float16
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "the description of the conversion has version 2; this release reads 1"),
        ({"points": []}, r"model\.layers\.0.* has the points number \d, of 0 that are listed"),
        ({"layers": []}, r"the conversion\['layers'\] must be an object, got \[\]"),
        ({"layers": {"lm_head": {"class": "Linear", "points": -1, "stream": 0}}}, "lm_head has the points number -1, of 2 that are listed"),
        (
            {"layers": {"lm_head": {"class": "Linear", "points": 0, "stream": "0"}}},
            r"\['stream'\] must be an integer or an object, got '0'",
        ),
    ],
)
def test_from_pretrained_refuses_a_malformed_conversion(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    converted().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(qsim.FileError, match=rf"from_pretrained: .*config\.json is malformed: .*{message}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_base_model_finds_its_layers_in_the_checkpoint_of_a_head(tmp_path: Path) -> None:
    model = qsim.convert(exported.tiny_llama(), "mxfp8")
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    tokens = torch.arange(10).view(1, 10)
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert [name for name, *_ in qsim.nn.conversion(again).changed] == [
        name for name, *_ in qsim.nn.conversion(model).changed if name != "lm_head"
    ]


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="transformers takes the histories of experts for experts")
def test_a_base_model_finds_its_experts_in_the_checkpoint_of_a_head(tmp_path: Path) -> None:
    model, tokens = qsim.convert(exported.tiny_mixture(), {"*.experts": DELAYED}), torch.arange(8)[None]
    model(tokens)  # gives delayed scales a history
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    assert torch.equal(base(tokens).last_hidden_state, model.eval().model(tokens).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert qsim.nn.conversion(again).calls == qsim.nn.conversion(model).calls


def test_without_the_module_transformers_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qsim.convert(exported.tiny_llama(), "mxfp8").save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "qsim")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    auto.logger.addHandler(handler)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    auto.logger.removeHandler(handler)
    assert any("Unknown quantization type, got qsim" in message for message in said)
    assert type(loaded.lm_head) is nn.Linear


def test_a_config_describes_its_own_model_only() -> None:
    model = qsim.convert(exported.tiny_llama(), "mxfp8")
    copied, restored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    qsim.convert(model, "mxfp4")
    rules = {
        "mxfp8": "PerBlock(size=32, dim=-1, format='e8m0', rule='ceil')",
        "mxfp4": "PerBlock(size=32, dim=-1, format='e8m0', rule='floor')",
    }
    for each, recipe in ((model, "mxfp4"), (copied, "mxfp8"), (restored, "mxfp8")):
        assert each.config.to_dict()["quantization_config"]["points"][0]["act"]["scale"] == rules[recipe]
    # A config that becomes another model's does not say that it is converted.
    assert copy.deepcopy(model.config).to_dict()["quantization_config"] is None
    around = qsim.convert(nn.ModuleDict({"inner": exported.tiny_llama()}), "mxfp8")
    assert "model.layers.0.mlp.up_proj" in around["inner"].config.to_dict()["quantization_config"]["layers"]
    assert "quantization_config" not in qsim.revert(model).config.to_dict()


def test_a_model_that_was_saved_without_a_conversion_is_loaded_without_one(tmp_path: Path) -> None:
    qsim.save(exported.tiny_llama(), tmp_path / "plain")
    loaded = qsim.load(exported.tiny_llama(), tmp_path / "plain")
    assert "quantization_config" not in loaded.config.to_dict()


def test_an_exported_model_has_the_files_that_servers_read(tmp_path: Path) -> None:
    model = exported.tiny_llama().bfloat16()
    qsim.convert(model, qsim.recipes.fp8_hybrid(scaling.PerRow()), exclude=["lm_head"])
    qsim.export(model, tmp_path / "out", max_shard_size="50KB")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["model_type"], config["vocab_size"]) == ("bfloat16", "llama", 48)
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert (tmp_path / "out" / "generation_config.json").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    # The tied head is not stored twice, and every file is named in the index.
    assert "model.embed_tokens.weight" in index
    assert "lm_head.weight" not in index
    assert {"model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight_scale"} <= index.keys()
    assert set(index.values()) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert model.config.to_dict()["quantization_config"]["quant_method"] == "qsim"


def test_experts_have_the_names_of_their_checkpoints(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=48, num_local_experts=2, **sizes))
    qsim.convert(model, "mxfp8", exclude=["lm_head"])
    with pytest.warns(UserWarning, match=r"products with them are rounded: model\.layers\.0\.mlp\.gate\.weight"):
        qsim.export(model, tmp_path / "out", exclude="*.experts")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    expert = "model.layers.0.block_sparse_moe.experts.1.w2"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {f"{expert}.weight", "model.layers.0.self_attn.q_proj.weight_scale"} <= {*file.keys()}
    # Servers take single experts and routers for linear layers.
    assert {expert, "model.layers.0.block_sparse_moe.gate", "lm_head"} <= {*config["ignore"]}
    assert not {"model.embed_tokens", "model.norm", "model.layers.0.self_attn.q_proj"} & {*config["ignore"]}


def test_an_example_gives_the_scale_of_the_inputs_of_all_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, seen = qsim.convert(exported.tiny_mixture(), {"*.experts": exported.BLOCKS["nvfp4"]}).eval(), torch.arange(8)[None], []
    with pytest.raises(ValueError, match="which servers read from the checkpoint: give example=inputs, or weight_only=True"):
        qsim.export(model, tmp_path / "out")
    hook = model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    finder = object()
    monkeypatch.setattr(observers, "_finder", finder)
    qsim.export(model, tmp_path / "out", example=tokens)
    hook.remove()
    assert observers._finder is finder  # a monitor goes on as before
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        scales = [
            file.get_tensor(f"model.layers.0.mlp.experts.{i}.{part}.input_global_scale")
            for i in (0, 1)
            for part in ("gate_proj", "up_proj")
        ]
    assert all(torch.equal(scale, (448 * 6 / seen[0].abs().amax()).view(1)) for scale in scales)


@pytest.mark.parametrize("name", ["tensor", "channel", "tiles", "mxfp8", "mxfp4", "nvfp4", "int8"])
def test_torchao_keeps_experts_in_their_stacks(name: str, tmp_path: Path) -> None:
    """A scale of the whole weight is one for each expert, and the way back gives the same results."""
    points = (exported.FP8 | exported.BLOCKS | exported.INTEGERS)[name]
    points = FivePoint(points.act if name in ("channel", "mxfp8", "nvfp4") else None, points.weight, act_bwd=None, weight_bwd=None)
    model, tokens = qsim.convert(exported.tiny_mixture(), {"*.experts": points}), torch.arange(8)[None]
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert [row[0] for row in qsim.export(model, tmp_path / "out", "torchao").layers] == [stack, stack.replace("gate_up", "down")]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    assert stack in config["_data"]["fqn_to_config"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        header, prefix = dict(file.metadata()), "model.layers.0.mlp.experts._gate_up_proj_"
        own = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    facts = json.loads(header[stack])
    if isinstance(facts["_data"]["block_size"], list):
        one, *block = facts["_data"]["block_size"]
        assert one == 1
        facts["_data"]["block_size"] = block
    for i in range(2):
        parts = {f"_weight_{part}": tensor[i] for part, tensor in own.items()}
        found = layout_decoders.torchao({"x.weight": json.dumps(facts)}, "x", parts)
        assert torch.equal(found, exported.expected_of_expert(model, i, points))
    loaded = qsim.load(exported.tiny_mixture(), tmp_path / "out").eval()
    torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits)


def test_stacks_that_a_layout_cannot_express_are_refused_by_the_name_of_their_module(tmp_path: Path) -> None:
    model = qsim.convert(exported.tiny_mixture(), {"*.experts": FivePoint(weight="bf16", weight_bwd=None)})
    said = r"torchao' cannot express model.layers.0.mlp.experts.gate_up_proj .2 layers in all.*exclude='model.layers.0.mlp.experts' writes"
    with pytest.raises(ValueError, match=said):
        qsim.export(model, tmp_path / "out", "torchao")


@pytest.mark.parametrize("name", ["tensor", "tiles", "delayed", "mxfp4"])
def test_experts_are_exported_one_by_one(name: str, tmp_path: Path) -> None:
    """Qwen3-MoE's checkpoints have the rows of gate and up apart, which the model multiplies as one matrix with one scale."""
    points = (exported.FP8 | exported.BLOCKS)[name]
    model, tokens = qsim.convert(exported.tiny_mixture(), {"*.experts": points}), torch.arange(8)[None]
    model(tokens)  # gives delayed scales a history
    table = qsim.export(model, tmp_path / "out")
    assert [layer for layer, *_ in table.layers][:2] == [f"model.layers.0.mlp.experts.{i}.gate_proj" for i in (0, 1)]
    assert len(str(table).splitlines()) == 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert not [key for key in tensors if "gate_up_proj" in key]
    (group,) = config["config_groups"].values()
    for i in range(2):
        expected = exported.expected_of_expert(model, i, points)
        for part, rows in (("gate_proj", expected[:64]), ("up_proj", expected[64:])):
            prefix = f"model.layers.0.mlp.experts.{i}.{part}."
            own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            assert torch.equal(layout_decoders.compressed_tensors(group, own), rows)
    with pytest.warns(UserWarning, match="a scale for each product there") if name == "delayed" else nullcontext():
        loaded = qsim.load(exported.tiny_mixture(), tmp_path / "out").eval()
    if name != "delayed":
        torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits)
    again = qsim.convert(loaded, qsim.checkpoints.points(tmp_path / "out"))
    assert qsim.nn.conversion(again).calls == qsim.nn.conversion(model).calls
    if name != "delayed":  # the checkpoints of others lack qsim's description
        (tmp_path / "out" / DESCRIPTION).unlink()
        loaded = qsim.load(exported.tiny_mixture(), tmp_path / "out")
        assert [row[:2] for row in qsim.nn.conversion(loaded).calls] == [row[:2] for row in qsim.nn.conversion(model).calls]


def test_layers_that_servers_merge_have_a_common_scale(tmp_path: Path) -> None:
    def exported_with(outer: scaling.PerTensor) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
        model = exported.tiny_llama()
        layer = model.model.layers[0]
        with torch.no_grad():
            layer.self_attn.k_proj.weight *= 5.0
            layer.mlp.gate_proj.weight *= 0.3
        qsim.convert(model, FivePoint(weight=Block("e2m1", 16, "e4m3", "fit", outer=outer), weight_bwd=None), exclude=["lm_head"])
        qsim.export(model, tmp_path / "out", overwrite=True)
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scales = {name: tensors[name] for name in tensors if name.startswith("model.layers.0") and name.endswith("global_scale")}
        return model, tensors, {name.split(".")[-2]: scale for name, scale in scales.items()}

    model, tensors, scales = exported_with(exported.E8M0)
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    for name, module in model.named_modules():
        if isinstance(module, qsim.nn.Linear):
            own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
            assert torch.equal(layout_decoders.compressed_tensors(group, own), exported.expected(module)), name
    with pytest.warns(UserWarning, match="servers merge model.layers.0.self_attn.q_proj, .* and 3 further groups, and take one scale"):
        _, _, scales = exported_with(scaling.PerTensor())
    assert scales["q_proj"] != scales["k_proj"]
    fp8 = qsim.convert(exported.tiny_llama(), FivePoint(weight=Quantizer("e4m3", scale="tensor"), weight_bwd=None), exclude=["lm_head"])
    with pytest.warns(UserWarning, match=r"round their weights again, to a common scale; scales per row are kept, as in fp8_hybrid\("):
        qsim.export(fp8, tmp_path / "fp8")


def test_the_recipe_for_nvfp4_has_scales_that_merged_layers_share(tmp_path: Path) -> None:
    tokens = torch.arange(8)[None]
    with pytest.warns(UserWarning, match=r"take one scale of the whole weight .* as in nvfp4\(outer=PerTensor\('e8m0', 'ceil'\)\)"):
        qsim.export(qsim.convert(exported.tiny_llama(), "nvfp4"), tmp_path / "out", example=tokens)
    recipe = qsim.recipes.nvfp4(outer=scaling.PerTensor("e8m0", "ceil"))
    assert qsim.recipes.resolve("""nvfp4(outer="PerTensor('e8m0', 'ceil')")""") == recipe
    model = qsim.convert(exported.tiny_llama(), recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qsim.export(model, tmp_path / "out", example=tokens, overwrite=True)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, qsim.nn.Linear) and name != "lm_head"}
    for name, layer in layers.items():
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        assert torch.equal(layout_decoders.compressed_tensors(group, own), exported.expected(layer)), name
    for i in (0, 1):
        scales = [tensors[f"model.layers.{i}.self_attn.{each}_proj.weight_global_scale"] for each in "qkv"]
        assert scales[0] == scales[1] == scales[2]


def test_servers_merge_the_projections_of_latent_attention(tmp_path: Path) -> None:
    model = nn.ModuleDict({"q_a_proj": nn.Linear(32, 32), "kv_a_proj_with_mqa": nn.Linear(32, 48), "q_b_proj": nn.Linear(32, 32)})
    with torch.no_grad():
        model["q_a_proj"].weight *= 5.0
    qsim.convert(model, FivePoint(weight=Block("e2m1", 16, "e4m3", "fit", outer=exported.E8M0), weight_bwd=None))
    qsim.export(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        first, second, other = (file.get_tensor(f"{name}.weight_global_scale") for name in model)
    assert first == second != other


def test_a_recipe_in_a_quantization_config_is_no_description(tmp_path: Path) -> None:
    """Errors do not blame the folder's `config.json` alone, which has no `quantization_config`."""
    qsim.revert(converted()).save_pretrained(tmp_path)
    for given, error, message in (
        ({"recipe": "mxfp8"}, ValueError, r"^quantization_config has recipe, .* call qsim.convert\(model, recipe\)"),
        ({}, qsim.FileError, r"^from_pretrained: quantization_config given or in \S*config.json is malformed: .* lacks 'version'"),
    ):
        with pytest.raises(error, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config={"quant_method": "qsim", **given})
