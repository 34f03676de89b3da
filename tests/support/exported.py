"""Models for exported checkpoints: points that layouts express, and the weights that the forward pass multiplies."""

import torch
from torch import Tensor, nn

import qsim
from qsim import Block, FivePoint, Quantizer, Stochastic, scaling

E8M0 = scaling.PerTensor("e8m0", "ceil")

#: Points by the name of the numbers that they make, in the order of their layers.
FP8 = {
    "tensor": FivePoint(Quantizer("e4m3", scale="tensor"), Quantizer("e4m3", scale="tensor"), act_bwd=None, weight_bwd=None),
    "no scale": FivePoint("e4m3", "e4m3", act_bwd=None, weight_bwd=None),
    "given": FivePoint(
        Quantizer("e4m3", scale=scaling.Given(0.03)),
        Quantizer("e4m3", "toward_zero", scale=scaling.Given(0.01)),
        act_bwd=None,
        weight_bwd=None,
    ),
    "channel": FivePoint(
        Quantizer("e4m3", scale=scaling.PerRow()), Quantizer("e4m3", scale=scaling.PerRow()), act_bwd=None, weight_bwd=None
    ),
    "delayed": FivePoint(
        Quantizer("e4m3", scale=scaling.Delayed(4)), Quantizer("e4m3", scale=scaling.Delayed(4)), act_bwd=None, weight_bwd=None
    ),
    "tiles": FivePoint(Block("e4m3", 64, rule="ceil"), Block("e4m3", (64, 32), scale="fp32", rule="fit"), act_bwd=None, weight_bwd=None),
    "blocks": FivePoint(weight=Block("e4m3", 32, scale="fp32", rule="fit"), weight_bwd=None),
    "under a scale": FivePoint(weight=Quantizer("e4m3", scale=scaling.PerRow(format="e4m3", outer=scaling.PerTensor())), weight_bwd=None),
    "blocks under a scale": FivePoint(weight=Block("e4m3", 32, outer=scaling.PerTensor(margin=40)), weight_bwd=None),
    "stochastic": FivePoint(weight=Quantizer("e4m3", Stochastic(8), scale="tensor"), weight_bwd=None),
}
INTEGERS = {
    "int8": qsim.recipes.int8().points,
    "int8 tensor": FivePoint(Quantizer("int8", scale="tensor"), Quantizer("int8", scale="tensor"), act_bwd=None, weight_bwd=None),
    "int8 weights": FivePoint(weight=Quantizer("int8", scale=scaling.PerRow()), weight_bwd=None),
    "int4 weights": FivePoint(weight=Quantizer("int4", scale=scaling.PerBlock(32)), weight_bwd=None),
}
BLOCKS = {
    "mxfp8": qsim.recipes.mxfp8().points,
    "mxfp6": FivePoint(weight="mxfp6_e2m3", weight_bwd=None),
    "mxfp4": FivePoint("mxfp4", "mxfp4", act_bwd=None, weight_bwd=None),
    "mxfp4 tiles": FivePoint("mxfp8", Block("e2m1", (32, 64)), act_bwd=None, weight_bwd=None),
    "nvfp4": qsim.recipes.nvfp4().points,
    "nvfp4 of powers": FivePoint(weight=Block("e2m1", 16, "e4m3", "fit", outer=E8M0), weight_bwd=None),
    "nvfp4 alone": FivePoint(weight=Block("e2m1", 16, "e4m3", "fit"), weight_bwd=None),
}
TORCHAO_ONLY = {
    "e5m2": FivePoint(weight=Quantizer("e5m2", scale=scaling.PerRow()), weight_bwd=None),
    "mxfp8_e5m2": FivePoint(weight="mxfp8_e5m2", weight_bwd=None),
    "mxfp6_e3m2": FivePoint(weight="mxfp6_e3m2", weight_bwd=None),
}


def model_of(points: dict[str, FivePoint], rows: int = 96, columns: int = 128, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A linear layer for each points, with weights of many magnitudes, between a norm and a plain head."""
    torch.manual_seed(0)
    layers = [nn.Linear(columns, rows, bias=i == 0) for i in range(len(points))]
    model = nn.Sequential(nn.LayerNorm(columns), *layers, nn.Linear(columns, 2)).to(dtype)
    with torch.no_grad():
        for layer in layers:
            layer.weight *= torch.exp2(torch.randint(-9, 3, (rows, columns // 16)).repeat_interleave(16, 1))
            layer.weight[0, :32] = 0.0
    qsim.convert(model, {str(i + 1): each for i, each in enumerate(points.values())}, exclude=[str(len(points) + 1)])
    for layer in layers:
        layer(torch.randn(3, columns, dtype=dtype))  # gives delayed scales a history
    return model


def expected(layer: nn.Linear, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that a layer's forward pass multiplies, through `qsim.quantize` and the directions of a linear layer."""
    point = layer.points.weight
    scale = point.scale
    if isinstance(scale, scaling.Delayed):
        scale = scaling.Given((layer.weight_amaxes.amax() / point.format.max).item())
    rounding = "nearest" if point.rounding.is_stochastic else point.rounding
    return qsim.quantize(layer.weight.detach().float(), point.format, rounding=rounding, scale=scale).to(dtype)


def tiny_llama() -> nn.Module:
    """A Llama with tied embeddings and two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, tie_word_embeddings=True, **sizes)).eval()


def tiny_mixture() -> nn.Module:
    """A mixture of two experts in one layer, whose checkpoints have the rows of gate and up apart."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=48, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64, **sizes))


def expected_of_expert(model: nn.Module, number: int, points: FivePoint, name: str = "gate_up_proj") -> Tensor:
    """The projections that the forward pass of an expert multiplies: gate and up, or down."""
    experts = model.model.layers[0].mlp.experts
    layer = nn.Linear(64, 128, bias=False)
    layer.weight, layer.points = nn.Parameter(getattr(experts, name)[number].detach()), points
    layer.weight_amaxes = experts._buffers.get(f"{name}_weight_amaxes")
    return expected(layer)
