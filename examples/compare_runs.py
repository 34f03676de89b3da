"""Where two runs part: six real pairs of runs, and what `qsim.compare` names as the first difference and as the largest.

    python examples/compare_runs.py
    python examples/compare_runs.py --device cuda --size gpt2

The second command needs an H100 or H200, whose FP8 sums it compares with their emulation. Without a GPU, sums in another order stand in for
another device, and the emulator is compared with itself. It belongs to docs/guides/diverged.md and needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

import qsim
from qsim import FivePoint, Quantizer
from qsim.accumulators import Rounded
from qsim.diagnostics import RunComparison

#: Layers, width, heads, tokens of a GPT-2.
SIZES = {"tiny": (2, 64, 2, 16), "gpt2": (12, 768, 12, 64)}
FP8 = Quantizer("e4m3", scale="tensor")


class Case(NamedTuple):
    """Two runs of one training step, and what their first difference should be."""

    title: str
    a: nn.Module
    b: nn.Module
    batch: Tensor


def gpt2(size: str) -> tuple[nn.Module, Tensor]:
    layers, width, heads, tokens = SIZES[size]
    vocabulary = {"vocab_size": 128 if size == "tiny" else 50257, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=tokens, **vocabulary)
    return GPT2LMHeadModel(config).eval(), torch.randint(128, (2, tokens))


def mixture() -> tuple[nn.Module, Tensor]:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=128, num_local_experts=4, **sizes)).eval(), torch.randint(128, (2, 16))


def latent_attention() -> tuple[nn.Module, Tensor]:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    widths = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = DeepseekV3Config(vocab_size=128, first_k_dense_replace=2, **sizes, **widths)
    return DeepseekV3ForCausalLM(config).eval(), torch.randint(128, (2, 16))


def with_points(model: nn.Module, points: Any, include: str | None = None) -> nn.Module:
    return qsim.convert(copy.deepcopy(model), points, include)


def cases(device: str, size: str) -> Iterator[Case]:
    """The pairs of runs, one at a time."""
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    model, batch = gpt2(size)

    def summed(accumulator: Any, **options: Any) -> nn.Module:
        points = FivePoint(FP8, FP8, FP8, accumulate=accumulator, **options)
        return with_points(model, points, "transformer.h.*").to(device)

    if on_gpu:
        yield Case("GPT-2, FP8 sums: emulator, chip", summed("h100_fp8", chip="never"), summed("h100_fp8", chip="require"), batch)
    else:
        yield Case("GPT-2, FP8 sums: emulator, emulator again", summed("h100_fp8"), summed("h100_fp8"), batch)
    yield Case("GPT-2, FP8 sums: float32, H100", summed(Rounded("fp32")), summed("h100_fp8"), batch)
    yield Case("GPT-2, sums: FP32, BF16", summed(Rounded("fp32")), summed(Rounded("bf16")), batch)
    if on_gpu:
        yield Case("GPT-2 in float32: CPU, CUDA", model, copy.deepcopy(model).to(device), batch)
    else:
        yield Case("GPT-2, order of sums: sequential, pairwise", summed(Rounded("fp32")), summed(Rounded("fp32", order="pairwise")), batch)
    model, batch = latent_attention()
    b = with_points(model, FivePoint(FP8, FP8), "*.kv_b_proj")
    yield Case("MLA: float32, FP8 where latents expand", model.to(device), b.to(device), batch)
    model, batch = mixture()
    b = with_points(model, FivePoint("bf16", "bf16", output="bf16"), "*.gate")
    yield Case("mixture: router in FP32, in BF16", model.to(device), b.to(device), batch)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits: Tensor = model(batch.to(device)).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().to(device))


def report(title: str, found: RunComparison, seconds: float) -> None:
    """Print what is compared, the first difference, and where most of it arises."""
    print(f"{title} ({len(found)} tensors, {seconds:.1f} s)")
    if found.first is None:
        print("  no difference\n")
        return
    print(f"  first: {found.first.title}, {found.first.cause}, relative error {found.first.error:.1e}")
    most = found.worst("own")[0]
    sums = "" if math.isnan(most.accumulation) else f", of which accumulation {most.accumulation:.1e}"
    print(f"  most arises in {most.title}: {most.own:.1e}{sums}")
    last = [record for record in found if record.tensor == "output"][-1]
    print(f"  the loss differs by {last.error:.1e}\n")


def main(device: str = "cpu", size: str = "tiny", backward: bool = True, chosen: Sequence[int] | None = None) -> list[RunComparison]:
    """Compare the pairs of runs, print what is found, and return it."""
    results, make = [], cases(device, size)
    for number, case in enumerate(make):
        if chosen is not None and number not in chosen:
            continue
        start = time.perf_counter()
        found = qsim.compare(case.a, case.b, case.batch, loss, backward=backward)
        report(case.title, found, time.perf_counter() - start)
        results.append(found)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the GPT-2 (default: tiny)")
    given = parser.parse_args()
    main(given.device, given.size)
