"""The five measurements: a ring, narrow sums, a rollout, a stalled descent, and layer norms in MXFP8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import Quantizer
from qsim.studies.learners.gpt import GPT, size
from qsim.studies.learners.gpt_training import MIXED, GPTTraining, train_gpt
from qsim.studies.learners.images import DIGITS, images
from qsim.studies.learners.text import LIBRARY, VOCABULARY, text

#: The numbers that every rank sends, and the sums whose variance is measured.
NUMBERS, _SUMS = 4096, 4096
#: A share of the variance of exact sums, and the length of the longest sums for each number of mantissa bits.
LEFT, _LONGEST = 0.9, 64
#: The sums of which a product is made in a rollout, and the length and the number of sequences.
_PARTS, _CONTEXT, _HELD_OUT = 4, 32, 32
#: Looks at a descent, and draws of each rounded step.
_LOOKS, _DRAWS = 60, 8
#: A residual perceptron: its width, its blocks, and the examples of an update.
_WIDTH, _BLOCKS, _BATCH = 64, 4, 256


def ring(ranks: Sequence[int], seed: int, device: torch.device) -> dict[str, list[float]]:
    """The error of sums over ranks, relative to the sums: rounded at every hop, and once."""
    draw = torch.Generator().manual_seed(seed)
    sent = torch.randn(max(ranks), NUMBERS, generator=draw).bfloat16().to(device)
    exact, hops = torch.zeros(NUMBERS, dtype=torch.float64, device=device), sent[0]
    found: dict[str, list[float]] = {"ring": [], "one_shot": []}
    for count, own in enumerate(sent, 1):
        exact = exact + own.double()
        hops = own if count == 1 else qsim.quantize(hops.float() + own.float(), "bf16").bfloat16()
        if count in ranks:
            for name, total in (("ring", hops), ("one_shot", exact.float().bfloat16())):
                found[name].append(float((total.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()))
    return found


def narrow_sums(bits: int, seed: int, device: torch.device) -> dict[str, Any]:
    """The variance of sums in an accumulator with some mantissa bits, relative to that of exact ones, at lengths that double."""
    draw, accumulator = torch.Generator().manual_seed(seed), qsim.Float(7, bits)
    total, exact = torch.zeros(_SUMS, device=device), torch.zeros(_SUMS, dtype=torch.float64, device=device)
    lengths, shares = [], []
    for count in range(1, _LONGEST * 4**bits + 1):
        a, b = (qsim.quantize(torch.randn(_SUMS, generator=draw), "e4m3").to(device) for _ in range(2))
        exact += a.double() * b.double()
        total = qsim.quantize(total + a * b, accumulator)
        if count & (count - 1) == 0:
            lengths.append(count)
            shares.append(float(total.double().square().mean() / exact.square().mean()))
    return {"lengths": lengths, "shares": shares, "length": _crossing(lengths, shares)}


def _crossing(lengths: Sequence[int], shares: Sequence[float]) -> float:
    """The length at which shares fall below `LEFT` for good, between two of those given; infinity if they do not."""
    found = math.inf
    for (short, more), (long, less) in pairwise(zip(lengths, shares, strict=True)):
        if more >= LEFT > less:
            found = short * (long / short) ** ((more - LEFT) / (more - less))
    return found


def rollout(steps: int, seed: int, device: torch.device) -> dict[str, list[float]]:
    """The differences of held-out bytes' probabilities between two orders of sums, in BF16 and in FP16."""
    words = text(LIBRARY, _CONTEXT, device)
    torch.manual_seed(seed)
    model = GPT(size("tiny"), VOCABULARY, _CONTEXT).to(device)
    how = GPTTraining("tiny", MIXED, 4e-3, steps, 8, _CONTEXT, 1.0, seed)
    train_gpt(how, model, torch.optim.AdamW(model.parameters(), lr=how.rate), words)
    tokens = words.validation(_HELD_OUT, _CONTEXT).long()[:, :-1]
    found: dict[str, list[float]] = {"divergence": [], "difference": []}
    for name in ("bf16", "fp16"):
        trainer, engine = (_log_probabilities(model, tokens, name, parts) for parts in (1, _PARTS))
        found["divergence"].append(float((engine.exp() * (engine - trainer)).sum(-1).mean()))
        found["difference"].append(float(((engine - trainer).square() * engine.exp()).sum(-1).mean().sqrt()))
    return found


class _InParts(nn.Module):
    """A linear layer whose products are sums of several parts."""

    def __init__(self, layer: nn.Linear, parts: int) -> None:
        super().__init__()
        self.layer, self.parts = layer, parts

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        parts = zip(x.chunk(self.parts, -1), self.layer.weight.chunk(self.parts, -1), strict=True)
        total, *others = (F.linear(*part) for part in parts)
        for other in others:
            total = total + other
        return total if self.layer.bias is None else total + self.layer.bias


@torch.no_grad()
def _log_probabilities(model: GPT, tokens: Tensor, format: str, parts: int) -> Tensor:
    """The logarithms of the next bytes' probabilities, when every operator rounds."""
    copy = GPT(size("tiny"), VOCABULARY, _CONTEXT).to(tokens.device)
    copy.load_state_dict(model.state_dict())
    for module in list(copy.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, _InParts(child, parts))
    with qsim.fpu(format):
        logits: Tensor = copy(tokens)
    return logits.double().log_softmax(-1)


def descent(rate: float, steps: int, seed: int, device: torch.device) -> dict[str, list[float]]:
    """At some steps of a descent with rounded gradients, the ratio of the gradient's norm to the noise's, and the progress that is left.

    Args:
        rate: The learning rate, in units of the inverse of a bound on the curvature.
        steps: The number of steps.
        seed: The seed of the rounding and of the weights.
        device: The device.
    """
    data = images(DIGITS, device)
    x = F.pad(data.x.flatten(1), (0, 1), value=1.0)
    labels = F.one_hot(data.y, 10).float()
    rate /= 0.5 * float(torch.linalg.eigvalsh(x.double().T @ x.double() / len(x))[-1])
    torch.manual_seed(seed)
    weight = 0.01 * torch.randn(10, x.shape[1], device=device)
    point = Quantizer("nvfp4", "stochastic")

    def gradient(rounds: bool) -> Tensor:
        off = (x @ weight.T).softmax(1) - labels
        left, right = (point(off.T.contiguous()), point(x.T.contiguous())) if rounds else (off.T, x.T)
        return left @ right.T / len(x)

    def loss(at: Tensor) -> float:
        return float(F.cross_entropy((x @ at.T).double(), data.y))

    found: dict[str, list[float]] = {"ratio": [], "progress": []}
    for step in range(steps):
        if step * _LOOKS // steps < (step + 1) * _LOOKS // steps:
            exact, drawn = gradient(False), [gradient(True) for _ in range(_DRAWS)]
            noise = torch.stack([(other - exact).square().sum() for other in drawn]).mean().sqrt()
            full = loss(weight) - loss(weight - rate * exact)
            rounded = sum(loss(weight) - loss(weight - rate * other) for other in drawn) / _DRAWS
            found["ratio"].append(float(exact.norm() / noise))
            found["progress"].append(rounded / full)
        weight -= rate * gradient(True)
    return found


class _StudentBlock(nn.Module):
    """A residual perceptron with a layer norm, whose affine parameters may be rounded."""

    def __init__(self, affine: Quantizer | None) -> None:
        super().__init__()
        self.norm, self.affine = nn.LayerNorm(_WIDTH), affine
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream behind this block."""
        scale, shift = (part if self.affine is None else self.affine(part) for part in (self.norm.weight, self.norm.bias))
        hidden = F.gelu(self.up(F.layer_norm(x, (_WIDTH,), scale, shift)))
        return x + self.down(hidden)  # type: ignore[no-any-return]


def student(products: str, affine: str, steps: int, rate: float, seed: int, device: torch.device) -> dict[str, float]:
    """The loss of a student at the end of its training, a geometric mean over the last tenth of the updates.

    Args:
        products: The recipe of its products; empty: none.
        affine: The format of its layer norms' affine parameters; empty: none.
        steps: The number of updates.
        rate: The learning rate of Adam.
        seed: The seed of the teacher, of the student and of the data.
        device: The device.
    """
    torch.manual_seed(seed)
    teacher = nn.Sequential(*(_StudentBlock(None) for _ in range(_BLOCKS))).to(device)
    model = nn.Sequential(*(_StudentBlock(Quantizer(affine) if affine else None) for _ in range(_BLOCKS))).to(device)
    if products:
        qsim.convert(model, products)
    optimizer, draw, losses = torch.optim.Adam(model.parameters(), lr=rate), torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        x = torch.randn(_BATCH, _WIDTH, generator=draw).to(device)
        with torch.no_grad():
            due = teacher(x)
        loss = F.mse_loss(model(x), due)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = torch.tensor(losses[-max(1, steps // 10) :], dtype=torch.float64).nan_to_num(1e30, 1e30).clamp(1e-30, 1e30)
    return {"loss": float(last.log().mean().exp())}
