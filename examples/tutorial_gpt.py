"""A small GPT learns Hamlet in float32, BF16, FP8 and FP4. docs/tutorial.md goes through this script step by step.

    python examples/tutorial_gpt.py --steps 50 --seeds 0          # does it run here?
    python examples/tutorial_gpt.py --json docs/figures/tutorial.json    # the numbers of the page

Tokens are characters. The text is hamlet.txt, next to this script; its last twentieth is held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import qsim

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 128, 4, 64, 16
METHODS = ("float32", "bf16", "fp8", "fp4")
EVERY = 25  # steps between two points of a curve


class Block(nn.Module):
    """Attention and a multilayer perceptron: the linear layers that `convert` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after this block."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next character, at each position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Text:
    """The play as numbers: one per character."""

    def __init__(self) -> None:
        text = (Path(__file__).parent / "hamlet.txt").read_text(encoding="ascii")
        self.characters = sorted(set(text))
        tokens = torch.tensor([self.characters.index(character) for character in text])
        self.train, self.held_out = tokens.tensor_split([len(tokens) * 19 // 20])

    def batch(self, generator: torch.Generator) -> Tensor:
        """Random windows of the text, one character longer than the context."""
        starts = torch.randint(len(self.train) - CONTEXT, (BATCH, 1), generator=generator)
        return self.train[starts + torch.arange(CONTEXT + 1)]

    def validation(self) -> Tensor:
        """Windows that cover the held-out text."""
        return self.held_out[: len(self.held_out) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)


def prepare(method: str, vocabulary: int, seed: int) -> tuple[GPT, torch.optim.Optimizer]:
    """A model and its optimizer. Everything that differs between the methods is here."""
    torch.manual_seed(seed)
    model = GPT(vocabulary)
    options = {"lr": 6e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if method == "bf16":
        model = model.to(torch.bfloat16)
        return model, qsim.optim.AdamW(model.parameters(), update="stochastic", **options)
    if method == "fp8":
        qsim.convert(model, "fp8_hybrid", exclude=["head"])
    elif method == "fp4":
        qsim.convert(model, "nvfp4.with_(last=0)", exclude=["head"])
    return model, torch.optim.AdamW(model.parameters(), **options)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss in nats per character, computed in float32."""
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(method: str, text: Text, steps: int, seed: int) -> tuple[GPT, dict[str, object]]:
    """Train; return the model and both of its curves."""
    model, optimizer = prepare(method, len(text.characters), seed)
    warmup = max(steps // 20, 1)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - step / steps))
    generator = torch.Generator().manual_seed(seed)  # for the batches only
    curves: dict[str, list[float]] = {"training": [], "validation": []}
    seen = 0.0
    for step in range(1, steps + 1):
        loss = loss_of(model, text.batch(generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seen += loss.item()
        if step % EVERY == 0:
            curves["training"].append(round(seen / EVERY, 4))
            curves["validation"].append(round(evaluate(model, text), 4))
            seen = 0.0
    return model, {"method": method, "seed": seed, **curves}


@torch.no_grad()
def evaluate(model: nn.Module, text: Text) -> float:
    """The loss on held-out text, computed with the same roundings as in training."""
    return loss_of(model, text.validation()).item()


@torch.no_grad()
def write(model: nn.Module, text: Text, length: int = 240) -> str:
    """Let a model write on from a line of the play, character by character."""
    written = "HAMLET.\n"
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        tokens = torch.tensor([[text.characters.index(character) for character in written[-CONTEXT:]]])
        chances = (model(tokens)[0, -1].float() / 0.7).softmax(0)
        written += text.characters[int(torch.multinomial(chances, 1, generator=generator))]
    return written


def entropy(text: Text) -> float:
    """The loss of a model that knows how frequent each character is, and nothing else."""
    shares = text.train.bincount() / len(text.train)
    return -(shares * shares.log())[shares > 0].sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write curves and samples to a file")
    args = parser.parse_args()
    if args.steps < EVERY:
        parser.error(f"--steps must be at least {EVERY}: a curve has a point every {EVERY} steps")
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    text = Text()
    print(f"{len(text.train)} characters to learn from; loss of a model that sees no context: {entropy(text):.2f}\n")
    print(f"{'method':<8}  seed  training  held out")
    runs, samples = [], {}
    for method in METHODS:
        for seed in args.seeds:
            model, run = train(method, text, args.steps, seed)
            runs.append(run)
            print(f"{method:<8}  {seed:>4}  {run['training'][-1]:>8.3f}  {run['validation'][-1]:>8.3f}", flush=True)
            samples.setdefault(method, write(model, text))
    print(f"\nwritten by the model in FP4:\n{samples['fp4']}")
    if args.json is not None:
        held = {"steps": args.steps, "every": EVERY, "entropy": entropy(text), "torch": torch.__version__, "qsim": qsim.__version__}
        args.json.write_text(json.dumps({**held, "runs": runs, "samples": samples}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
