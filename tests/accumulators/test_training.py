"""Training on an H100 or H200: the bits of the chip, of its emulator, and of a CPU where everything else is computed alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.accumulators.chips import Chip
from qsim.studies.learners.gpt import GPT, language_loss, size
from support.points import in_order

pytestmark = pytest.mark.gpu
STEPS = 10
CHIPS: tuple[Chip, Chip] = ("auto", "never")


@pytest.mark.parametrize("accumulator", ["h100_fp8", "h100_fp8_promoted"])
def test_a_small_model_trains_as_on_a_cpu(accumulator: str, hopper: torch.device) -> None:
    on_chip, emulated = (net_trained(hopper, accumulator, chip) for chip in CHIPS)
    on_cpu = net_trained(torch.device("cpu"), accumulator, "never")
    for found in (on_chip, emulated):
        for name, wanted in on_cpu.items():
            assert torch.equal(found[name].cpu(), wanted), name
    losses = on_cpu["losses"]
    assert losses[-1] < 0.9 * losses[0]


def net_trained(device: torch.device, accumulator: str, chip: Chip) -> dict[str, Tensor]:
    """The losses of a net in ten steps, and its weights. Every device computes the same.

    Products are added by the accumulator. All else is one operation per element, rounded once: there are no biases, whose gradients torch
    adds in an order of its own, and the learning rate is a power of two. The loss is a sum by an accumulator, too.
    """
    points = in_order(*["e4m3"] * 5, accumulate=accumulator, chip=chip)
    draw, widths = torch.Generator().manual_seed(0), (64, 256, 128, 32)
    model = nn.Sequential()
    for before, after in pairwise(widths):
        layer = qsim.nn.Linear(before, after, bias=False, points=points)
        layer.weight.data = torch.randn(after, before, generator=draw) * (2 / before) ** 0.5
        model.extend([layer, nn.ReLU()])
    model = model[:-1].to(device)  # no ReLU at the end
    x, target = (torch.randn(256, width, generator=draw).to(device) for width in (widths[0], widths[-1]))
    losses = []
    for _ in range(STEPS):
        off = model(x) - target
        losses.append(qsim.matmul(off.detach().view(1, -1), off.detach().view(-1, 1), "Rounded('fp32')").view(()))
        off.backward(off.detach())
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight -= 2.0**-14 * weight.grad
                weight.grad = None
    assert chip == "never" or "chip" in multiplied_by(model, x)
    return {"losses": torch.stack(losses), **{name: weight.detach() for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("accumulator", ["h100_fp8", "h100_fp8_promoted"])
def test_a_gpt_trains_as_with_the_emulator(accumulator: str, hopper: torch.device) -> None:
    """Attention, embeddings and the loss are torch's own, in one order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        on_chip, emulated = (gpt_losses(hopper, accumulator, chip) for chip in CHIPS)
    finally:
        torch.use_deterministic_algorithms(before)
    assert on_chip == emulated
    assert on_chip[-1] < on_chip[0]


def gpt_losses(device: torch.device, accumulator: str, chip: Chip) -> list[float]:
    """The losses of a GPT in ten steps."""
    torch.manual_seed(0)
    model = GPT(size("mini"), 256, 128).to(device, torch.bfloat16)
    qsim.convert(model, qsim.recipes.fp8_hybrid().with_(accumulate=accumulator, chip=chip), exclude=["head"])
    tokens = torch.randint(256, (16, 129), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = language_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert chip == "never" or "chip" in multiplied_by(model, tokens[:, :-1])
    return torch.stack(losses).tolist()


def multiplied_by(model: nn.Module, x: Tensor) -> set[str]:
    """Who computes a model's products that have accumulators; the library splits some that are thin, which are emulated."""
    return {product["by"] for product in qsim.coverage(model, x).to_dict()["products"]}
