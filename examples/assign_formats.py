"""Which format each tensor of each layer gets for a number of bits, and what that is worth in training.

A model is trained for a while in full precision, `qsim.assign` finds the assignment, and the model is trained from the start with it; with
one format in all layers; and with the best of random assignments, searched for as long as `assign` took. It belongs to
docs/guides/which-layer.md.

    python examples/assign_formats.py                                                       a small GPT, in 15 minutes on two cores
    python examples/assign_formats.py --model resnet                                        a residual net
    python examples/assign_formats.py --model gpt2 --device cuda --steps 60 --warm-up 30 --seeds 1   GPT-2 small on a GPU
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt.model import GPT, SIZES, Size
from gpt.text import VOCABULARY, Text
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim.studies.statistics import mean

#: The batch and the width of the residual net.
BATCH, WIDTH = 64, 32
TENSORS = ("act", "weight", "grad")


def blocks(element: Any) -> qsim.FivePoint:
    """Blocks of 32 with power-of-two scales: round-to-nearest forward, stochastic backward."""
    block = qsim.Block(element, 32, rule="ceil")
    noisy = qsim.Quantizer(block, "stochastic")
    return qsim.FivePoint(block, block, noisy, act_bwd=noisy, weight_bwd=noisy)


CANDIDATES = {"ternary": blocks(qsim.Fixed(2, 0, symmetric=True))} | {
    name: blocks(name) for name in ("e2m0", "e2m1", "e2m2", "e2m3", "e4m3")
}


@dataclass(frozen=True)
class Task:
    """A task for a model: its data, its loss and its learning rate.

    Attributes:
        make: Makes the model; its weights depend on torch's seed.
        batch: The batch of a seed and a step.
        test: The batches to test on.
        loss: The loss of a model and a batch.
        rate: The learning rate.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    test: list[Any]
    loss: Callable[[Any, Any], Tensor]
    rate: float


def language(size: Size, text: Text, batch: int, rate: float) -> Task:
    """A GPT that predicts the next byte."""

    def make() -> nn.Module:
        model = GPT(size, VOCABULARY, text.context)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5 * (0.5 if name.endswith(("merge", "down")) else 1.0))
        nn.init.normal_(model.tokens.weight, std=0.1)
        return model

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens[:, :-1].long(), tokens[:, 1:].long())
        return found

    test = list(text.validation(8 * batch).split(batch))
    return Task(make, lambda seed, step: text.batch(batch, seed, step), test, loss, rate)


class Residual(nn.Module):
    """Two convolutions, whose result is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.last = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return x + self.last(self.second(F.relu(self.norm(self.first(x)))))


def images(device: torch.device) -> Task:
    """A residual net that reads handwritten digits."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16).to(device)
    y = torch.tensor(labels)[order].to(device)
    half = len(y) // 2

    def make() -> nn.Module:
        stem = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False)
        body = [Residual(WIDTH), nn.MaxPool2d(2), Residual(WIDTH), nn.MaxPool2d(2), Residual(WIDTH)]
        return nn.Sequential(stem, *body, nn.ReLU(), nn.Flatten(), nn.Linear(4 * WIDTH, 10))

    def drawn(seed: int, step: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(half, (BATCH,), generator=torch.Generator().manual_seed(1_000_003 * seed + step)).to(device)
        return x[rows], y[rows]

    return Task(make, drawn, [(x[half:], y[half:])], lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]), 3e-3)


def trained(task: Task, seed: int, steps: int, recipe: Any, device: torch.device, planned: int | None = None) -> nn.Module:
    """A model after some steps, of those planned."""
    torch.manual_seed(seed)
    model = task.make().to(device)
    if recipe is not None:
        qsim.convert(model, recipe, calls="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, total_steps=planned or steps, pct_start=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(seed, step)).backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def tested(task: Task, model: nn.Module) -> float:
    """The test loss."""
    model.eval()
    return float(torch.stack([task.loss(model, batch) for batch in task.test]).mean())


def gradients(task: Task, model: nn.Module, batches: list[Any], layers: list[str]) -> list[list[Tensor]]:
    """The gradients of the weights of some layers, for each batch."""
    weights = [model.get_submodule(name).weight for name in layers]
    return [list(torch.autograd.grad(task.loss(model, batch), weights)) for batch in batches]


def random_search(task: Task, model: nn.Module, batches: list[Any], found: Any, seconds: float, seed: int) -> dict[str, Any]:
    """The best of random assignments of the same cost, by the same measure, in the same time."""
    draw, names = random.Random(seed), list(CANDIDATES)
    layers = list(found.recipe)
    work = copy.deepcopy(model)
    true = gradients(task, work, batches, layers)
    best: tuple[float, dict[str, Any]] = (float("inf"), {})
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or not best[1]:
        recipe = drawn_assignment(found, names, draw)
        qsim.convert(work, recipe, calls="none")
        pairs = zip(gradients(task, work, batches, layers), true, strict=True)
        error = sum(float((g - h).square().sum() / h.square().sum()) for gs, hs in pairs for g, h in zip(gs, hs, strict=True))
        best = min(best, (error, recipe), key=lambda pair: pair[0])
    return best[1]


def drawn_assignment(found: Any, names: list[str], draw: random.Random) -> dict[str, Any]:
    """A random assignment within the budget that leaves no room for more bits."""
    places = [(record.layer, record.point) for record in found]
    whole = sum(record.elements for record in found)
    bits = {(own.layer, own.point, own.candidate): own.bits * own.elements / whole for own in found.sensitivities}
    chosen = {place: draw.randrange(len(names)) for place in places}

    def fits() -> bool:
        return sum(bits[(*place, names[index])] for place, index in chosen.items()) <= found.budget + 1e-9

    while not fits():
        place = draw.choice(places)
        chosen[place] = max(0, chosen[place] - 1)
    for place in draw.sample(places, len(places)):
        while chosen[place] + 1 < len(names):
            chosen[place] += 1
            if not fits():
                chosen[place] -= 1
                break
    return {layer: joined(*(CANDIDATES[names[chosen[layer, tensor]]] for tensor in TENSORS)) for layer in found.recipe}


def joined(act: qsim.FivePoint, weight: qsim.FivePoint, grad: qsim.FivePoint) -> qsim.FivePoint:
    """Points of three candidates."""
    return qsim.FivePoint(act.act, weight.weight, grad.grad, act_bwd=act.act_bwd, weight_bwd=weight.weight_bwd)


def compare(task: Task, args: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """The test losses of each way to choose formats, for each seed."""
    losses: dict[str, list[float]] = {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        model = trained(task, seed, args.warm_up, None, device, planned=args.steps)
        batches = [task.batch(seed, -1 - number) for number in range(3)]
        start = time.perf_counter()
        found = qsim.assign(model, batches, task.loss, budget=args.like, candidates=CANDIDATES)
        seconds = time.perf_counter() - start
        print(f"seed {seed}: assigned in {seconds:.0f} s\n{found if seed == args.first_seed else found.table(rows=0)}", flush=True)
        if seed == args.first_seed and args.figure:
            found.plot().figure.savefig(args.figure)
        ways = {"float32": None, f"{args.like} everywhere": CANDIDATES[args.like], "assigned": found.recipe}
        if not args.without_search:
            ways["random search"] = random_search(task, model, batches, found, seconds, seed)
        for name, recipe in ways.items():
            runs = [trained(task, seed + 1_000 * run, args.steps, recipe, device) for run in range(args.runs)]
            losses.setdefault(name, []).append(sum(tested(task, run) for run in runs) / len(runs))
            print(f"seed {seed}: {name}: {losses[name][-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Compare the ways to choose formats."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=["gpt", "gpt2", "resnet"], default="gpt", help="a small GPT, GPT-2 small, or a residual net")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--like", choices=list(CANDIDATES), default="e2m0", help="the format whose bits are the budget")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=60, help="steps in full precision before formats are assigned")
    parser.add_argument("--runs", type=int, default=1, help="trainings with each assignment, whose losses are averaged")
    parser.add_argument("--without-search", action="store_true", help="leave out the random search, which takes as long as assign")
    parser.add_argument("--figure", default="", help="where to save the figure of error against bits")
    args = parser.parse_args()
    device = torch.device(args.device)
    hamlet = str(Path(__file__).with_name("hamlet.txt"))
    if args.model == "resnet":
        task = images(device)
    elif args.model == "gpt":
        task = language(Size(2, 64, 4), Text([hamlet], 64, device), batch=16, rate=4e-3)
    else:
        task = language(SIZES["small"], Text([], 256, device), batch=8, rate=6e-4)
    losses = compare(task, args, device)
    print(f"\ntest loss after {args.steps} steps, and what it is more than assigned, with 95 % intervals over {args.seeds} seeds")
    for name, own in losses.items():
        pairs = list(zip(own, losses["assigned"], strict=True))
        apart, ratio = mean([loss - best for loss, best in pairs]), mean([math.log(loss / best) for loss, best in pairs])
        value, low, high = (math.exp(end) for end in (ratio.value, ratio.low, ratio.high))
        shown = f"{apart.value:+.4f} [{apart.low:.4f}, {apart.high:.4f}]   × {value:.3g} [{low:.3g}, {high:.3g}]"
        print(f"{name:<20} {mean(own)}" + (f"   {shown}" if name != "assigned" else ""))


if __name__ == "__main__":
    main()
