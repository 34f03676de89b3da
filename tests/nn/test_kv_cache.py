"""`qsim.nn.KVCache`: what comes in is rounded once, whatever the number of tokens in a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Quantizer, scaling
from support import exported
from support.comparing import same_bits

pytest.importorskip("transformers")

#: Keys or values: sequences, heads, tokens, width. Heads have different magnitudes.
STATES = torch.randn(2, 3, 8, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1)
OF_TOKENS = [
    Quantizer("e4m3"),
    Quantizer("e5m2", "toward_zero", scale=scaling.Given(0.5)),
    Quantizer("e4m3", scale="row"),
    Quantizer("mxfp8"),
    Quantizer("int4", scale="row", transform="Hadamard(32)"),
    Quantizer("e4m3", scale=scaling.PerRow(dim=3, format="e8m0", rule="ceil")),
]
KEPT = [
    Quantizer("e4m3", scale="tensor"),
    Quantizer("e4m3", scale=scaling.PerTensor("e8m0", "ceil", margin=1)),
    Quantizer("int8", scale=scaling.PerAxis(1)),
]


def taken(cache: Any, *sizes: int, states: Tensor = STATES) -> Tensor:
    """The keys after calls with so many tokens."""
    for part in states.split(list(sizes), 2):
        keys, values = cache.update(part, 2 * part, 0)
    assert values.shape == keys.shape
    return keys


@pytest.mark.parametrize("point", OF_TOKENS, ids=str)
def test_scales_of_tokens_and_heads_are_those_of_quantize(point: Quantizer) -> None:
    for sizes in ((8,), (5, 1, 1, 1), (1, 7)):
        cache = qsim.nn.KVCache(point, None)
        assert same_bits(taken(cache, *sizes), point(STATES))
        assert same_bits(cache.layers[0].values, 2 * STATES)


@pytest.mark.parametrize("point", KEPT, ids=str)
def test_scales_of_more_tokens_are_those_of_the_first_call(point: Quantizer) -> None:
    first, later = STATES.split([5, 3], 2)
    assert point.scale is not None
    by_head = first.abs().amax((0, 2, 3), keepdim=True)
    amax = by_head if isinstance(point.scale, scaling.PerAxis) else by_head.amax()
    # The scale of a single number is that of all whose largest magnitude it is.
    scale = amax / point.format.max
    if point.scale.format == qsim.format("e8m0"):
        scale = 2 * torch.exp2(scale.log2().ceil())
    expected = Quantizer(point.format)(later / scale) * scale
    for sizes in ((5, 3), (5, 1, 2)):
        keys = taken(qsim.nn.KVCache(point), *sizes)
        assert same_bits(keys[:, :, :5], point(first))
        assert same_bits(keys[:, :, 5:], expected)


def test_the_scale_over_nvfp4s_blocks_is_kept() -> None:
    point = Quantizer(qsim.Block("e2m1", 16, "e4m3", "fit", outer=scaling.PerTensor("e8m0", "ceil")))
    whole, parts = taken(qsim.nn.KVCache(point), 8), taken(qsim.nn.KVCache(point), 5, 3)
    assert same_bits(whole, point(STATES))
    assert same_bits(parts[:, :, :5], point(STATES[:, :, :5]))
    # Its largest magnitude is in the first part, so that all have the same scale.
    largest_first = STATES.index_select(2, torch.arange(8).roll(-int(STATES.abs().amax((0, 1, 3)).argmax())))
    cache = qsim.nn.KVCache("nvfp4")
    keys = taken(cache, 5, 3, states=largest_first)
    assert float((keys - Quantizer("nvfp4")(largest_first)).abs().max()) <= 1e-6 * float(STATES.abs().max())
    cache.reset()
    assert same_bits(taken(cache, 8, states=1e3 * largest_first), taken(qsim.nn.KVCache("nvfp4"), 8, states=1e3 * largest_first))


def test_zeros_do_not_decide_the_scale_of_later_tokens() -> None:
    states = torch.cat([torch.zeros(2, 3, 1, 32), STATES], 2)
    point = Quantizer("e4m3", scale="tensor")
    assert same_bits(taken(qsim.nn.KVCache(point), 1, 8, states=states)[:, :, 1:], point(STATES))


@pytest.mark.parametrize("kind", ["llama", "sliding", "latent"])
def test_one_token_at_a_time_gives_the_logits_of_all_at_once(kind: str) -> None:
    # In float64: products of one token and of all differ in their last bits, which decide a rounding in float32 too often.
    model = _model(kind).double()
    tokens = torch.arange(12).view(2, 6)
    point = Quantizer("e3m2", scale="row")
    with torch.no_grad():
        exact, whole = model(tokens).logits, model(tokens, past_key_values=_cache(model, point)).logits
        cache = _cache(model, point)
        single = torch.cat([model(token.unsqueeze(1), past_key_values=cache).logits for token in tokens.T], 1)
    torch.testing.assert_close(single, whole, atol=1e-6, rtol=1e-6)
    assert float((whole - exact).abs().max()) > 1e-4
    # Keys are rounded after the rotary embedding: those in the cache are numbers of the format.
    keys = cache.layers[0].keys
    assert same_bits(point(keys), keys)


def _cache(model: Any, point: Quantizer) -> Any:
    return qsim.nn.KVCache(point, config=model.config)


def _model(kind: str) -> Any:
    if kind == "llama":
        return exported.tiny_llama()
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "sliding":
        from transformers import MistralConfig, MistralForCausalLM

        return MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=3)).eval()
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    widths = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **widths, num_key_value_heads=2, first_k_dense_replace=1)).eval()


def test_generate_takes_it() -> None:
    model, tokens = exported.tiny_llama(), torch.arange(8).view(2, 4)
    found = [model.generate(tokens, past_key_values=qsim.nn.KVCache("nvfp4"), max_new_tokens=4, do_sample=False) for _ in range(2)]
    assert torch.equal(*found)
    beams = model.generate(tokens, past_key_values=qsim.nn.KVCache("e4m3"), max_new_tokens=3, num_beams=2, do_sample=False)
    assert beams.shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": Quantizer("e4m3", scale=scaling.PerTile(8, 8))}, "KVCache: keys: tokens would share scales that change with every call"),
        ({"keys": None, "values": Quantizer("int8", scale=scaling.PerBlock(8, dim=2))}, r"values: .* got scale=PerBlock\(size=8, dim=2"),
        (
            {"keys": Quantizer("e4m3", scale="delayed")},
            "give 'tensor', PerAxis\\(1\\), PerRow\\(\\), PerBlock\\(size\\) or Given\\(value\\)",
        ),
        ({"keys": Quantizer("e4m3", scale=scaling.PerAxis(2))}, "tokens would share scales"),
        ({"keys": Quantizer("nvfp4", transform="Hadamard(16)")}, "a transform needs scales of tokens, without one of the whole tensor"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qsim.nn.KVCache(**arguments)


def test_it_is_a_name_of_the_package() -> None:
    assert "KVCache" in dir(qsim.nn)
    assert repr(qsim.nn.KVCache("e4m3", None)) == "KVCache(keys=e4m3, values=None, 0 tokens)"
    with pytest.raises(AttributeError, match=r"module 'qsim\.nn' has no attribute 'Cache'"):
        qsim.nn.Cache  # type: ignore[attr-defined]  # noqa: B018
