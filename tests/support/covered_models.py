"""Tiny models with random weights, as users have them: of transformers, torchvision, timm and diffusers, if these are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

#: A model, and its inputs by keyword.
Made = tuple[nn.Module, dict[str, Any]]

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_TEXT = {**_SIZES, **_TOKENS, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGES = {**_SIZES, "image_size": 32, "patch_size": 8}
_MOE = {**_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {**_TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_MAMBA = {**_TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_GEMMA = {**_GROUPED, "head_dim": 8}
_DEEPSEEK = {
    **_TEXT,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_QWEN3_NEXT = {
    **_MOE,
    **{f"linear_{part}_head_dim": 8 for part in ("key", "value")},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA2 = {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
_WHISPER = {
    **_TOKENS,
    "d_model": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    **{
        f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    },
}


def _ids() -> Tensor:
    return torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def _image(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def _language(name: str, config: str, sizes: dict[str, Any]) -> Callable[[], Made]:
    def make() -> Made:
        transformers: Any = import_module("transformers")
        return getattr(transformers, name)(getattr(transformers, config)(**sizes)), {"input_ids": _ids(), "labels": _ids()}

    return make


def _vit() -> Made:
    transformers: Any = import_module("transformers")
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**_IMAGES))
    return model, {"pixel_values": _image(), "labels": torch.tensor([0, 1])}


def _whisper() -> Made:
    transformers: Any = import_module("transformers")
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**_WHISPER))
    return model, {"input_features": torch.randn(2, 8, 32), "labels": _ids()}


def _clip() -> Made:
    transformers: Any = import_module("transformers")
    config = transformers.CLIPConfig(text_config=_TEXT, vision_config=_IMAGES, projection_dim=16)
    return transformers.CLIPModel(config), {"input_ids": _ids(), "pixel_values": _image(), "return_loss": True}


def _diffusion(name: str, sizes: dict[str, Any], **inputs: Any) -> Callable[[], Made]:
    def make() -> Made:
        diffusers: Any = import_module("diffusers")
        model = getattr(diffusers, name)(sample_size=8, in_channels=4, out_channels=4, attention_head_dim=8, **sizes)
        latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        first = "sample" if name.startswith("UNet") else "hidden_states"
        return model, {first: latents, "timestep": torch.tensor([3, 7]), **inputs, "return_dict": False}

    return make


_UNET = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
_DIT = {"num_attention_heads": 4, "num_layers": 2, "patch_size": 2, "num_embeds_ada_norm": 10}


def _vision(package: str, name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        package_: Any = import_module(package)
        create = partial(package_.create_model, name) if package == "timm" else getattr(package_, name)
        return create(num_classes=10, **options), {"input" if package == "timm" else "x": _image(size)}

    return make


MODELS: dict[str, Callable[[], Made]] = {
    "BERT": _language("BertForMaskedLM", "BertConfig", _TEXT),
    "GPT-2": _language("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "Llama": _language("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Mistral": _language("MistralForCausalLM", "MistralConfig", _GROUPED),
    "Qwen3-MoE": _language("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _MOE),
    "Mixtral": _language("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "T5": _language("T5ForConditionalGeneration", "T5Config", _T5),
    "ViT": _vit,
    "Whisper": _whisper,
    "CLIP": _clip,
    "Mamba": _language("MambaForCausalLM", "MambaConfig", _MAMBA),
    "Gemma 3": _language("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "DeepSeek-V3": _language("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
    "gpt-oss": _language("GptOssForCausalLM", "GptOssConfig", {**_GEMMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mamba-2": _language("Mamba2ForCausalLM", "Mamba2Config", _MAMBA2),
    "Qwen3-Next": _language("Qwen3NextForCausalLM", "Qwen3NextConfig", _QWEN3_NEXT),
    "UNet (diffusers)": _diffusion("UNet2DConditionModel", _UNET, encoder_hidden_states=torch.zeros(2, 5, 32)),
    "DiT (diffusers)": _diffusion("DiTTransformer2DModel", _DIT, class_labels=torch.tensor([1, 2])),
    "ResNet-18 (torchvision)": _vision("torchvision.models", "resnet18"),
    "MobileNetV2 (torchvision)": _vision("torchvision.models", "mobilenet_v2"),
    "ConvNeXt (torchvision)": _vision("torchvision.models", "convnext_tiny"),
    "Swin (torchvision)": _vision("torchvision.models", "swin_t"),
    "ViT (torchvision)": _vision("torchvision.models", "vit_b_32", image_size=64),
    "ResNet-18 (timm)": _vision("timm", "resnet18"),
    "MobileNetV3 (timm)": _vision("timm", "mobilenetv3_small_050"),
    "ConvNeXt (timm)": _vision("timm", "convnext_atto"),
    "Swin (timm)": _vision("timm", "swin_tiny_patch4_window7_224", img_size=64, window_size=4),
    "ViT (timm)": _vision("timm", "vit_tiny_patch16_224", img_size=64),
}
