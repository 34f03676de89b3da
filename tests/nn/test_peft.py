"""PEFT with converted models, both ways: adapters around a converted model, and a model with adapters converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint
from support.comparing import same_bits

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))
KINDS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=40))


def adapted(model: Any, kind: str) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind]())


def results(model: Any) -> list[Tensor]:
    found = model(input_ids=TOKENS, labels=TOKENS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [found.logits, *torch.autograd.grad(found.loss, trained)]


@pytest.mark.parametrize("kind", KINDS)
def test_both_orders_compute_the_same(kind: str) -> None:
    """The layers below round, and the adapters do not."""
    before, after = adapted(qsim.convert(llama(), NEAREST), kind), qsim.convert(adapted(llama(), kind), NEAREST)
    assert all(map(same_bits, results(before), results(after)))
    assert not torch.equal(results(before)[0], results(adapted(llama(), kind))[0])
    assert not any("lora_" in name for name, _, _ in qsim.nn.conversion(after).changed)
    names = {name.removeprefix("base_model.model.") for name, _, _ in qsim.nn.conversion(after).changed}
    assert {"model.layers.0.mlp.down_proj.base_layer", "model.layers.0.mlp.up_proj"} <= names


def test_adapters_round_on_request() -> None:
    model = qsim.convert(adapted(llama(), "lora"), NEAREST, adapters=True)
    assert any("lora_A" in name for name, _, _ in qsim.nn.conversion(model).changed)
    assert not torch.equal(results(model)[0], results(qsim.convert(adapted(llama(), "lora"), NEAREST))[0])


def test_adapters_train_are_saved_and_merged(tmp_path: Path) -> None:
    model = adapted(qsim.convert(llama(), NEAREST), "lora")
    frozen = [parameter.clone() for parameter in model.parameters() if not parameter.requires_grad]
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 5e-2)
    losses = []
    for _ in range(15):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert all(map(torch.equal, frozen, [parameter for parameter in model.parameters() if not parameter.requires_grad]))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(qsim.convert(llama(), NEAREST), tmp_path)
    assert same_bits(loaded.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
    merged = model.merge_and_unload()
    assert len(qsim.nn.conversion(merged).changed) == 8
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, llama().model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize("kind", [*KINDS, "loha", "vera"])
def test_exactly_the_listed_layers_round(kind: str) -> None:
    """Compare `conversion` with what `coverage` finds, adapters that multiply by parameters of their own included."""
    more = {"loha": peft.LoHaConfig(target_modules=["q_proj"], r=4), "vera": peft.VeraConfig(target_modules=["q_proj"], r=4)}
    model = qsim.convert(peft.get_peft_model(llama(), more[kind] if kind in more else KINDS[kind]()), NEAREST)
    listed = {name for name, *_ in (*qsim.nn.conversion(model).changed, *qsim.nn.conversion(model).calls)}
    products = qsim.coverage(model, {"input_ids": TOKENS, "labels": TOKENS}).products
    assert {product.module for product in products if product.points} == listed
    assert any("q_proj" in product.module or "k_proj" in product.module for product in products if product.points)
