"""Attention and experts that models of Hugging Face choose by name: qsim's own, and kernels that cannot be rounded."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from qsim.nn.calls.attention import attention
from qsim.nn.calls.settings import call_points
from support.comparing import same_bits
from support.roundings import nearest

transformers: Any = pytest.importorskip("transformers")
import_module("qsim.hugging_face")

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 20, "num_hidden_layers": 1}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
TOKENS = torch.arange(12).view(2, 6)
NAME = "model.layers.0.self_attn"


def mixtral(**chosen: str) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=2)
    for kind, name in chosen.items():
        setattr(config, f"_{kind}_implementation", name)
    return transformers.MixtralForCausalLM(config).eval()


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[1])).requires_grad_()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return heads(2, 4, 5, 8), heads(2, 2, 6, 8), heads(2, 2, 6, 8).detach().flip(0).requires_grad_()


def module(**facts: Any) -> Any:
    found = nn.Module()
    found.__dict__.update({"num_key_value_groups": 2, "training": False, **facts})
    return found


def chosen(model: Any, calls: Any = "parameters") -> dict[str, str]:
    """The modules whose calls are rounded."""
    return {name: products for name, products, _ in qsim.nn.conversion(qsim.convert(model, NEAREST, calls=calls)).calls}


def test_one_name_rounds_all_products_of_a_model() -> None:
    usual, own = mixtral(attn="eager", experts="eager"), mixtral(attn="qsim", experts="qsim")
    torch.testing.assert_close(own(TOKENS).logits, usual(TOKENS).logits)
    assert NAME not in chosen(mixtral(attn="sdpa"))
    assert chosen(own, calls="none") == {}
    assert chosen(own)[NAME] == "products of activations"
    # Releases of transformers before 5.18 multiply the frequencies of rotary embeddings by positions.
    reasons = {product.reason for product in qsim.coverage(own, TOKENS, backward=False).products}
    assert {reason for reason in reasons if not reason.endswith("inv_freq")} == {""}


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "t5"])
def test_unrounded_attention_is_that_of_transformers(name: str) -> None:
    """A bound of the scores, a score without a value, and a bias of positions, each with grouped queries and a mask."""
    given = operands()
    mask = torch.zeros(5, 6).masked_fill(torch.ones(5, 6).triu(2).bool(), torch.finfo(torch.float32).min)
    options: dict[str, Any] = {"softcap": 0.5} if name == "gemma2" else {"position_bias": heads(1, 4, 5, 6)} if name == "t5" else {}
    sinks = heads(4, 1).detach().flatten()
    theirs = import_module(f"transformers.models.{name}.modeling_{name}").eager_attention_forward
    repeated = [x.repeat_interleave(2, 1) for x in given[1:]] if name == "t5" else given[1:]
    expected = theirs(module(sinks=sinks), given[0], *repeated, mask, scaling=0.4, **options)
    own = attention(module(), *given, mask, scaling=0.4, s_aux=sinks if name == "gpt_oss" else None, **options)
    for a, b in zip(own, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_both_products_are_rounded_at_the_points_of_the_module() -> None:
    attends = mixtral(attn="qsim").model.layers[0].self_attn
    qsim.convert(attends, NEAREST)
    found, weights = attention(attends, *operands(), None)
    q, k, v = operands()
    key, value = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = functional.matmul((functional.matmul(q, key.mT, NEAREST) * 8**-0.5).softmax(-1), value, NEAREST).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    assert weights.shape == (2, 4, 5, 6)
    given = operands()
    found = attention(attends, *given, None)[0]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), of) for y, of in ((found, given), (expected, (q, k, v)))), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)  # products of several heads are one sum, whose gradient is rounded


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4", "int8"])
def test_experts_are_a_linear_layer_for_each_expert(recipe: str) -> None:
    """Results and gradients, to the bit. Random bits would differ: all experts have one seed, and each of several layers has its own."""
    experts = mixtral(experts="qsim").model.layers[0].mlp.experts
    points = nearest(qsim.recipes.resolve(recipe).points)
    qsim.convert(experts, points)
    torch.manual_seed(1)
    x, chosen = torch.randn(8, 16), torch.randint(2, (8, 1))

    def written_out(x: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        found = x[order]
        for name, after in (("gate_up_proj", experts._apply_gate), ("down_proj", lambda y: y)):
            stream = call_points(experts).stream(name, experts.training)  # type: ignore[union-attr]
            groups = found.split(chosen.flatten().bincount(minlength=2).tolist())
            weights = getattr(experts, name)
            products = [functional.linear(groups[i], weights[i], None, points, stream=stream ^ i) for i in range(2)]
            found = after(torch.cat(products))
        return found[order.argsort()]

    def results(call: Any) -> list[Tensor]:
        torch.manual_seed(2)
        given = x.clone().requires_grad_()
        y = call(given)
        return [y, *torch.autograd.grad(y.square().sum(), [given, experts.gate_up_proj, experts.down_proj])]

    own, expected = results(lambda x: experts(x, chosen, torch.ones(8, 1))), results(written_out)
    assert all(map(same_bits, own, expected))


def test_queries_that_share_a_key_see_one_rounding_of_it() -> None:
    attends = qsim.convert(mixtral(attn="qsim").model.layers[0].self_attn, FivePoint(act=Quantizer("e2m1", "stochastic"), act_bwd=None))
    _, key, value = operands()
    weights = attention(attends, torch.ones(2, 4, 5, 8), key, value, None)[1]
    assert same_bits(weights[:, ::2], weights[:, 1::2])
    assert not torch.equal(weights[:, 0], weights[:, 2])


def test_kernels_that_cannot_be_rounded_are_refused_before_anything_changes() -> None:
    model = mixtral()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=rf"{NAME} computes in the kernel attn_implementation='flash_attention_2', whose products cannot"):
        qsim.convert(model, NEAREST, calls="all")
    assert qsim.nn.conversion(model).changed == ()
    qsim.convert(model, NEAREST)
    model.config._experts_implementation_internal = "deepgemm"
    with pytest.raises(ValueError, match=r"experts_implementation='deepgemm'.*choose 'eager', 'grouped_mm', 'batched_mm' or 'qsim'"):
        qsim.convert(model, NEAREST)
    qsim.convert(qsim.revert(model), NEAREST, exclude="*.experts")


def test_attention_that_the_conversion_left_out_warns() -> None:
    attends = qsim.convert(mixtral().model.layers[0].self_attn, NEAREST)
    with pytest.warns(UserWarning, match=r"attn_implementation='qsim': the layers of MixtralAttention round, and its products do not"):
        attention(attends, *operands(), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(qsim.revert(attends), *operands(), None)


def test_from_pretrained_repeats_the_conversion(tmp_path: Path) -> None:
    model = qsim.convert(mixtral(attn="qsim"), NEAREST)
    model.save_pretrained(tmp_path)
    for name in ("qsim", "sdpa"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        assert qsim.nn.conversion(loaded) == qsim.nn.conversion(model)
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-2, atol=1e-2)
