"""Models for exported checkpoints: points that layouts express, and the weights that the forward pass multiplies."""

import torch
from torch import Tensor, nn

import qsim
from qsim import Block, FivePoint, Quantizer, Stochastic, scaling

E8M0 = scaling.PerTensor("e8m0", "ceil")

#: Points by the name of the numbers that they make, in the order of their layers.
FP8 = {
    "tensor": FivePoint(Quantizer("e4m3", scale="tensor"), Quantizer("e4m3", scale="tensor")),
    "no scale": FivePoint("e4m3", "e4m3"),
    "given": FivePoint(Quantizer("e4m3", scale=scaling.Given(0.03)), Quantizer("e4m3", "toward_zero", scale=scaling.Given(0.01))),
    "channel": FivePoint(Quantizer("e4m3", scale=scaling.PerRow()), Quantizer("e4m3", scale=scaling.PerRow())),
    "delayed": FivePoint(Quantizer("e4m3", scale=scaling.Delayed(4)), Quantizer("e4m3", scale=scaling.Delayed(4))),
    "tiles": FivePoint(Block("e4m3", 128, rule="ceil"), Block("e4m3", (64, 32), scale="fp32", rule="fit")),
    "blocks": FivePoint(weight=Block("e4m3", 32, scale="fp32", rule="fit")),
    "under a scale": FivePoint(weight=Quantizer("e4m3", scale=scaling.PerRow(format="e4m3", outer=scaling.PerTensor()))),
    "blocks under a scale": FivePoint(weight=Block("e4m3", 32, outer=scaling.PerTensor(margin=40))),
    "stochastic": FivePoint(weight=Quantizer("e4m3", Stochastic(8), scale="tensor")),
}
INTEGERS = {
    "int8": qsim.recipes.int8().points,
    "int8 tensor": FivePoint(Quantizer("int8", scale="tensor"), Quantizer("int8", scale="tensor")),
    "int8 weights": FivePoint(weight=Quantizer("int8", scale=scaling.PerRow())),
    "int4 weights": FivePoint(weight=Quantizer("int4", scale=scaling.PerBlock(32))),
}
BLOCKS = {
    "mxfp8": qsim.recipes.mxfp8().points,
    "mxfp6": FivePoint(weight="mxfp6_e2m3"),
    "mxfp4": FivePoint("mxfp4", "mxfp4"),
    "mxfp4 tiles": FivePoint("mxfp8", Block("e2m1", (32, 64))),
    "nvfp4": qsim.recipes.nvfp4().points,
    "nvfp4 of powers": FivePoint(weight=Block("e2m1", 16, "e4m3", "fit", outer=E8M0)),
    "nvfp4 alone": FivePoint(weight=Block("e2m1", 16, "e4m3", "fit")),
}
TORCHAO_ONLY = {
    "e5m2": FivePoint(weight=Quantizer("e5m2", scale=scaling.PerRow())),
    "mxfp8_e5m2": FivePoint(weight="mxfp8_e5m2"),
    "mxfp6_e3m2": FivePoint(weight="mxfp6_e3m2"),
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


def expected_of_expert(model: nn.Module, number: int, points: FivePoint) -> Tensor:
    """The gate and up projections that the forward pass of an expert multiplies."""
    experts = model.model.layers[0].mlp.experts
    layer = nn.Linear(64, 128, bias=False)
    layer.weight, layer.points = nn.Parameter(experts.gate_up_proj[number].detach()), points
    layer.weight_amaxes = experts._buffers.get("gate_up_proj_weight_amaxes")
    return expected(layer)
