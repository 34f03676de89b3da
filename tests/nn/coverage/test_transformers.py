"""`qsim.coverage` of models of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import qsim
from support.multiplying_models import ALL


def _gpt2(transformers: Any) -> tuple[Any, Any]:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8, bos_token_id=0, eos_token_id=0)
    return config, transformers.GPT2LMHeadModel


def _bert(transformers: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.BertConfig(**sizes), transformers.BertForMaskedLM


def _llama(transformers: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.LlamaConfig(**sizes, num_key_value_heads=1), transformers.LlamaForCausalLM


def _mixtral(transformers: Any) -> tuple[Any, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=3), transformers.MixtralForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_gpt2, _bert, _llama, _mixtral])
def test_models_of_transformers(kind: Callable[[Any], tuple[Any, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    config, cls = kind(transformers)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model, ids = cls(config), torch.randint(20, (2, 6))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    qsim.convert(model, ALL)
    found = qsim.coverage(model, {"input_ids": ids, "labels": ids})
    assert found.multiply_adds == counter.get_total_flops() // 2
    assert found.never_called == ()
    left = {product.reason for product in found.products} - {""}
    on_parameters = {reason.rpartition(".")[2] for reason in left if reason.startswith("not a layer") and "parameter" in reason}
    assert on_parameters == set()
    assert found.share > 0.85
    assert "product of two activations" in left
    assert math.isclose(sum(p.multiply_adds for p in found.products if not p.reason) / found.multiply_adds, found.share)
