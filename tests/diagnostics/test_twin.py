"""`qsim.twin`: the engine's weights are those of a checkpoint, and each component's effect is its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics.rollout.engine import SERVED
from support import exported

pytest.importorskip("transformers")
TOKENS = torch.arange(24).view(2, 12) % 11


def tiny_mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=48, num_local_experts=4, num_experts_per_tok=2, **sizes))


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return tiny_mixtral()


def ratios(model: nn.Module, engine: nn.Module, cache: Any = None, **inputs: Tensor) -> Tensor:
    """log p_serving − log p_training of each token after the first, computed in other words."""
    with torch.no_grad():
        ours = model(TOKENS, use_cache=False, **inputs).logits[:, :-1]
        theirs = engine(TOKENS, past_key_values=cache, use_cache=cache is not None, **inputs).logits[:, :-1]
    found = [-nn.functional.cross_entropy(x.double().flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none") for x in (ours, theirs)]
    return (found[1] - found[0]).view(2, -1).float()


@pytest.mark.parametrize("serving", SERVED)
@pytest.mark.parametrize("decoder", ["qsim", "compressed-tensors"])
def test_weights_are_those_of_the_checkpoint_to_the_bit(serving: str, decoder: str, mixtral: Any, tmp_path: Path) -> None:
    """Compare those of layers, which multiply the unit matrix, and those of experts."""
    twin = qsim.twin(mixtral, FivePoint(weight=SERVED[serving].weight), cache=None, router=None)
    qsim.export(twin.model, tmp_path / "out")
    decoded = _by_qsim(tmp_path / "out") if decoder == "qsim" else _by_compressed_tensors(tmp_path / "out")
    with torch.no_grad():
        for name, module in twin.model.named_modules():
            if isinstance(module, qsim.nn.Linear):
                assert torch.equal(module(torch.eye(64)).mT, decoded[f"{name}.weight"]), name
    point = SERVED[serving].weight
    assert isinstance(point, Quantizer)
    experts = mixtral.model.layers[0].mlp.experts
    for i, (above, below) in enumerate(zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True)):
        gate, up = point(above).split(64)
        prefix = f"model.layers.0.block_sparse_moe.experts.{i}"
        assert torch.equal(decoded[f"{prefix}.w1.weight"], gate)
        assert torch.equal(decoded[f"{prefix}.w3.weight"], up)
        assert torch.equal(decoded[f"{prefix}.w2.weight"], point(below))


def _by_qsim(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, by their names there, as `qsim.load` gives them."""
    from transformers.core_model_loading import revert_weight_conversion

    loaded = qsim.load(tiny_mixtral(), folder)
    return dict(revert_weight_conversion(loaded, {name: x.detach() for name, x in loaded.named_parameters()}))


def _by_compressed_tensors(folder: Path) -> dict[str, Tensor]:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    stored, facts = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(facts).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(getattr(scheme.format, "value", scheme.format))
    layers = {name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")}
    found = {}
    for name in layers:
        prefix = name.removesuffix("weight")
        own = {key.removeprefix(prefix): x for key, x in stored.items() if key.startswith(prefix)}
        found[name] = compressor.decompress(own, scheme)["weight"].float()
    return found


def test_without_components_there_is_no_gap(mixtral: Any) -> None:
    found = qsim.twin(mixtral, FivePoint(), cache=None, router=None).gap(TOKENS)
    assert [record.component for record in found] == ["all"]
    assert (found[0].kl, found[0].largest, found[0].experts, found.cause) == (0.0, 0.0, 0.0, None)
    assert "no component changes it" in str(found)


COARSE = Quantizer("e3m1", scale="row")
FINE: dict[str, Any] = {"weights": "fp16", "inputs": "fp16", "cache": "fp16", "router": "fp16"}
PLANTED = {"weights": COARSE, "inputs": COARSE, "cache": COARSE, "router": "e5m0", "dtype": torch.bfloat16}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("component", PLANTED)
def test_the_cause_is_the_component_that_is_coarse(component: str, mixtral: Any) -> None:
    given = ({} if component == "dtype" else FINE) | {component: PLANTED[component]}
    points = FivePoint(given.get("inputs"), given.get("weights"))
    twin = qsim.twin(mixtral, points, cache=given.get("cache"), router=given.get("router"), dtype=given.get("dtype"))
    found = twin.gap(TOKENS)
    assert found.cause is not None
    assert found.cause.component == component
    assert found.tokens == 22
    whole = found["all",]
    assert found.cause.without < 0.2 * whole.kl
    assert found.cause.kl == pytest.approx(whole.kl, rel=0.3)
    expected = ratios(mixtral, twin.model, twin.cache())
    assert whole.log_ratios is not None
    torch.testing.assert_close(whole.log_ratios, expected, atol=2e-6, rtol=0)
    assert whole.mean == pytest.approx(float(whole.log_ratios.abs().mean()))
    assert whole.largest == pytest.approx(float(whole.log_ratios.abs().max()))


def test_kl_and_experts_are_as_defined(mixtral: Any) -> None:
    twin = qsim.twin(mixtral, "nvfp4", router="e4m0")
    with torch.no_grad():
        both = mixtral(TOKENS, output_router_logits=True), twin.model(TOKENS, output_router_logits=True, past_key_values=twin.cache())
    ours, theirs = (output.logits[:, :-1].double().softmax(-1) for output in both)
    chosen = [[logits.topk(2).indices.sort(-1).values for logits in output.router_logits] for output in both]
    flips = [(a != b).any(-1).double().mean() for a, b in zip(*chosen, strict=True)]
    whole = twin.gap(TOKENS)["all",]
    assert whole.kl == pytest.approx(float((theirs * (theirs / ours).log()).sum(-1).mean()), rel=1e-6)
    assert whole.experts == pytest.approx(float(sum(flips) / len(flips)))
    assert whole.experts > 0


def test_it_serves_what_is_trained(mixtral: Any) -> None:
    """A model that trains with the engine's roundings has no gap from them, also where its weights are rounded stochastically."""
    model, rows = tiny_mixtral(), SERVED["fp8"]
    qsim.convert(model, rows, exclude=["lm_head", "*.gate"])
    noisy = FivePoint(rows.act, Quantizer("e4m3", "stochastic", scale="row"))
    found = qsim.twin(model, noisy, router=None).gap(TOKENS)
    assert [(record.component, record.setting) for record in found] == [
        ("weights", "e4m3 rows"),
        ("inputs", "e4m3 rows"),
        ("cache", "e4m3"),
        ("all", ""),
    ]
    assert [record.largest for record in found][:2] == [0.0, 0.0]
    assert found["cache",].kl == found["all",].kl > 0
    unrounded = qsim.twin(model, FivePoint(), cache=None, router=None).gap(TOKENS)
    assert [record.setting for record in unrounded] == ["not rounded", "not rounded", ""]
    assert min(unrounded["all",].kl, unrounded["weights",].kl) > 0


def test_delayed_scales_have_the_history_of_training() -> None:
    model = tiny_mixtral()
    qsim.convert(model, qsim.recipes.fp8_hybrid(qsim.scaling.Delayed(2)), exclude=["lm_head", "*.gate", "*.experts"])
    for scale in (1.0, 3.0):
        with torch.no_grad():
            model.model.embed_tokens.weight *= scale
            model(TOKENS)
    twin = qsim.twin(model, qsim.recipes.fp8_hybrid(qsim.scaling.Delayed(2)), cache=None, router=None, exclude=["lm_head", "*.experts"])
    assert twin.gap(TOKENS)["all",].largest == 0.0


def test_the_trained_model_is_not_changed_and_is_followed() -> None:
    model = tiny_mixtral().train()
    model(TOKENS, labels=TOKENS).loss.backward()
    model.model.layers[0].eval()
    before = {name: (x.clone(), x.grad.clone()) for name, x in model.named_parameters() if x.grad is not None}
    modes = [module.training for module in model.modules()]
    kind, state = type(model), torch.get_rng_state()
    twin = qsim.twin(model, "fp8")
    first = twin.gap(TOKENS)["all",].kl
    assert torch.equal(state, torch.get_rng_state())
    assert (type(model), [module.training for module in model.modules()]) == (kind, modes)
    assert all(torch.equal(x, before[name][0]) and torch.equal(x.grad, before[name][1]) for name, x in model.named_parameters())
    assert not qsim.nn.conversion(model).changed
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight *= 8
    assert twin.gap(TOKENS)["all",].kl > first
    served = twin.model.model.layers[0].self_attn.v_proj.weight
    assert served.data_ptr() == model.model.layers[0].self_attn.v_proj.weight.data_ptr()
    assert not served.requires_grad


def test_a_checkpoint_has_the_gap_of_its_recipe(tmp_path: Path) -> None:
    model = exported.tiny_llama()
    by_recipe = qsim.twin(model, "fp8")
    qsim.export(by_recipe.model, tmp_path / "out")
    by_folder = qsim.twin(model, tmp_path / "out")
    assert by_folder.components == {"weights": "of out", "inputs": "e4m3 rows", "cache": "e4m3"}
    ours, theirs = by_recipe.gap(TOKENS), by_folder.gap(TOKENS)
    for record in ours:
        assert theirs[(record.component,)].kl == pytest.approx(record.kl, rel=1e-3)
        assert math.isnan(record.experts)
    assert float(ratios(model, model).abs().max()) == 0.0
    with torch.no_grad():  # the checkpoint is that of an earlier step
        model.model.layers[0].mlp.up_proj.weight *= 1.5
    later = by_folder.gap(TOKENS)
    assert later.cause == later["weights",]
    assert later["weights",].kl > 3 * theirs["weights",].kl
    with pytest.raises(ValueError, match="twin: h100_fp8 needs to know the formats of both operands: give serving as a recipe"):
        qsim.twin(model, tmp_path / "out", accumulate="h100_fp8")


def test_padding_does_not_count(mixtral: Any) -> None:
    mask = torch.ones_like(TOKENS)
    mask[1, :5] = 0
    batch = {"input_ids": TOKENS, "attention_mask": mask, "labels": TOKENS}
    found = qsim.twin(mixtral, "fp8").gap(batch)
    assert found.tokens == 11 + 6
    whole = found["all",].log_ratios
    assert whole is not None
    assert float(whole[1, :5].abs().max()) == 0.0
    assert float(whole[1, 5:].abs().min()) > 0.0


def test_sums_are_those_of_the_engine(mixtral: Any) -> None:
    """A unit for FP8 adds rounded operands only; an accumulator for any numbers has an effect of its own."""
    unit = qsim.twin(mixtral, "fp8", accumulate="h100_fp8", cache=None, router=None).gap(TOKENS)
    assert math.isnan(unit["sums",].kl)
    assert unit["sums",].without > 0
    bf16 = qsim.accumulators.Rounded("bf16")
    narrow = qsim.twin(mixtral, FivePoint("fp16", "fp16"), accumulate=bf16, cache=None, router=None).gap(TOKENS)
    assert narrow.cause is not None
    assert narrow.cause.component == "sums"


class Bigrams(nn.Module):
    """A language model without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))  # type: ignore[no-any-return]


def test_models_of_ones_own() -> None:
    torch.manual_seed(0)
    found = qsim.twin(Bigrams(), "mxfp4", cache=None).gap(TOKENS)
    assert [record.component for record in found] == ["weights", "inputs", "all"]
    assert found.to_dict()["cause"] in ("weights", "inputs")
    assert "log_ratios" not in json.loads(found.to_json())["components"][0]
    assert found.rows()[0]["tokens"] == 22


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: qsim.twin(Bigrams()), ValueError, "twin: the forward of Bigrams takes no past_key_values: give cache=None"),
        (lambda: qsim.twin(Bigrams(), "fp9", cache=None), ValueError, "serving must be 'fp8', 'nvfp4', the name of a recipe or the folder"),
        (lambda: qsim.twin(Bigrams(), 8, cache=None), TypeError, "serving must be a name, a recipe, a FivePoint or the path"),  # type: ignore[arg-type]
        (lambda: qsim.twin(Bigrams(), ".", cache=None), ValueError, "has no quantization_config of a layout that qsim.load reads"),
        (lambda: qsim.twin(Bigrams(), cache=None).gap(torch.ones(3, 4)), ValueError, "must have token ids .* got torch.float32 of shape"),
        (lambda: qsim.twin(Bigrams(), cache=None).gap(TOKENS[:, :1]), ValueError, r"at least two tokens each, got torch.int64 of shape"),
        (lambda: qsim.twin(nn.Embedding(11, 4), FivePoint(), cache=None).gap({"input": 1}), ValueError, "got None"),
        (lambda: qsim.twin(nn.Flatten(), FivePoint(), cache=None).gap(TOKENS), ValueError, "must return logits of shape"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
