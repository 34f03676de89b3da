"""Small models of Hugging Face's transformers, without downloads, with points."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits
from support.points import in_order

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="e4m3", weight_bwd="same", grad="e5m2")
WIDE = in_order(*["fp32"] * 5)
NOISY = in_order(*[Quantizer("e4m3", "stochastic")] * 5)
ATTENTION = "multiplies queries, keys and values by itself"
TABLE = "an embedding: embeddings=True converts it"


SIZES = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 20, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}


def gpt2() -> Any:
    """Linear layers with transposed weights, and a head that is tied to the embedding."""
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return made(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes))


def llama() -> Any:
    """Grouped queries, a gated MLP, an untied head."""
    return made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**GROUPED, num_hidden_layers=1))


def mixtral() -> Any:
    """Experts whose weights are stacked in one parameter."""
    return made(transformers.MixtralForCausalLM, transformers.MixtralConfig(**GROUPED, num_hidden_layers=1, num_local_experts=2))


def bert() -> Any:
    """An encoder, with nested attention modules."""
    return made(transformers.BertForSequenceClassification, transformers.BertConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2))


def made(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "bert": bert}
LAYERS = {
    "gpt2": {"Conv1D": 4, "Linear": 1},
    "llama": {"Linear": 8},
    "mixtral": {"Linear": 5},
    "bert": {"Linear": 8},
}
LEFT = {
    "gpt2": {"transformer.wte": TABLE, "transformer.wpe": TABLE, "transformer.h.0.attn": ATTENTION},
    "llama": {"model.embed_tokens": TABLE, "model.layers.0.self_attn": ATTENTION},
    "mixtral": {
        "model.embed_tokens": TABLE,
        "model.layers.0.self_attn": ATTENTION,
    },
    "bert": {
        **{f"bert.embeddings.{name}_embeddings": TABLE for name in ("word", "position", "token_type")},
        "bert.encoder.layer.0.attention.self": ATTENTION,
    },
}
names = pytest.mark.parametrize("name", MODELS)


def tokens() -> Tensor:
    return torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(1))


def gradients(model: Any) -> list[Tensor]:
    """A model's logits and the gradients of its parameters."""
    torch.manual_seed(4)
    logits = model(tokens()).logits
    used = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
    return [logits.detach(), *(gradient for gradient in used if gradient is not None)]


@names
def test_every_layer_is_converted_and_the_rest_is_named(name: str) -> None:
    model = MODELS[name]()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    for points in (WIDE, NEAREST):
        told = qsim.nn.conversion(qsim.convert(model, points))
        kinds = [kind for _, kind, _ in told.changed]
        assert {kind: kinds.count(kind) for kind in kinds} == LAYERS[name]
        assert {own for _, _, own in told.changed} == {points}
        assert dict(told.left) == LEFT[name]
        calls = {"model.layers.0.mlp.gate": "weight", "model.layers.0.mlp.experts": "gate_up_proj, down_proj"} if name == "mixtral" else {}
        assert told.calls == tuple((own, f"any products with {names}", points) for own, names in calls.items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys


@names
def test_wide_points_change_nothing_and_narrow_ones_do(name: str) -> None:
    native, model = gradients(MODELS[name]()), MODELS[name]()
    for own, expected in zip(gradients(qsim.convert(model, WIDE)), native, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + 1))
    narrow = gradients(qsim.convert(model, NEAREST))
    assert all(not torch.equal(own, expected) for own, expected in zip(narrow, native, strict=True))
    assert all(own.isfinite().all() for own in narrow)
    assert all(map(same_bits, gradients(qsim.convert(model, FivePoint())), native))
    assert all(map(same_bits, gradients(qsim.revert(model)), native))
    assert not [module for module in model.modules() if type(module).__module__.startswith("qsim")]


def test_conv1d_is_a_linear_layer_with_a_transposed_weight() -> None:
    layer: Any = transformers.pytorch_utils.Conv1D(6, 4)
    x = torch.randn(2, 3, 4)
    for points in (NEAREST, NOISY):
        qsim.convert(layer, points)
        assert isinstance(layer, transformers.pytorch_utils.Conv1D)
        assert repr(layer) == f"Conv1D(nf=6, nx=4, points=({points}))"
        torch.manual_seed(2)
        value = layer(x)
        torch.manual_seed(2)
        weight = layer.weight.detach().t().contiguous().requires_grad_()
        expected = functional.linear(x, weight, layer.bias, points, stream=layer.stream)
        assert same_bits(value, expected)
        own = torch.autograd.grad(value.square().sum(), layer.weight)[0]
        assert same_bits(own.t().contiguous(), torch.autograd.grad(expected.square().sum(), weight)[0])
    assert str(qsim.nn.conversion(copy.deepcopy(layer))) == f"(the model)  Conv1D  {NOISY}"
    assert type(qsim.revert(layer)) is transformers.pytorch_utils.Conv1D
    assert repr(layer) == "Conv1D(nf=6, nx=4)"


def test_patterns_of_their_names() -> None:
    model = qsim.convert(gpt2(), {"*.attn.c_attn": NEAREST, "*.mlp": NOISY}, exclude=["*.mlp.c_fc", "lm_head", "transformer.wte"])
    found = {name: points for name, _, points in qsim.nn.conversion(model).changed}
    assert found == {"transformer.h.0.attn.c_attn": NEAREST, "transformer.h.0.mlp.c_proj": NOISY}


def test_experts_and_attention_can_be_requested() -> None:
    found = qsim.nn.conversion(qsim.convert(mixtral(), NEAREST, include=["*.experts"]))
    assert (found.changed, found.calls) == ((), (("model.layers.0.mlp.experts", "any products with gate_up_proj, down_proj", NEAREST),))
    found = qsim.nn.conversion(qsim.convert(mixtral(), {"*_proj": NEAREST, "*.self_attn": NOISY}, calls="all"))
    assert found.calls == (("model.layers.0.self_attn", "products of activations", NOISY),)


@pytest.mark.parametrize("embeddings", [False, True])
def test_the_head_stays_tied_to_the_table(embeddings: bool) -> None:
    model = qsim.convert(gpt2(), NEAREST, embeddings=embeddings)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert type(model.transformer.wte) is (qsim.nn.Embedding if embeddings else nn.Embedding)
    model.tie_weights()
    assert model.lm_head.weight is model.transformer.wte.weight


@names
def test_trains_a_step(name: str) -> None:
    model = qsim.convert(MODELS[name](), NOISY)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = torch.tensor([0, 1]) if name == "bert" else tokens()
    losses = []
    for _ in range(4):
        loss = model(tokens(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_gradient_checkpointing_replays_the_noise() -> None:
    model = qsim.convert(llama().train(), NOISY)
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    assert all(map(same_bits, gradients(model), expected))


def test_generates_and_is_saved_and_loaded_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "qsim", raising=False)  # as without `import qsim.hugging_face`
    model = qsim.convert(llama(), NEAREST)
    prompt = tokens()[:1, :3]
    made = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 7)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(type(module).__module__.split(".")[0] != "qsim" for module in loaded.modules())
    assert all(map(same_bits, loaded.parameters(), model.parameters()))
    assert torch.equal(qsim.convert(loaded, NEAREST).generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0), made)


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits() -> None:
    model = qsim.convert(gpt2(), NEAREST)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same_bits(compiled(tokens(), use_cache=False).logits, model(tokens(), use_cache=False).logits)
