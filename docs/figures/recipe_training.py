"""A training curve for each recipe: the tutorial's GPT on Hamlet, compared with float32.

    python docs/figures/recipe_training.py           # trains with all recipes, and writes recipe_training.json
    python docs/figures/recipe_training.py nvfp4     # trains with one again

Weights, batches and learning rates are the same for all; everything except the output layer is converted.
"""

import json
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

STEPS, BATCH, EVERY = 100, 8, 10
DATA = Path(__file__).with_suffix(".json")


def draw() -> Figure:
    results = json.loads(DATA.read_text(encoding="utf-8"))
    losses, columns = results["losses"], 4
    steps = np.arange(1, results["steps"] // results["every"] + 1) * results["every"]
    names = [name for name in losses if name != "float32"]
    figure, panels = plt.subplots(-(-len(names) // columns), columns, figsize=(6.8, 6.8), sharex=True, sharey=True)
    for axes in panels.flat[len(names) :]:
        axes.axis("off")
    for name, axes in zip(names, panels.flat, strict=False):
        axes.plot(steps, losses["float32"], linewidth=4, alpha=0.3, color=plt.rcParams["text.color"])
        axes.plot(steps, losses[name], linewidth=1.2)
        axes.set(ylim=(2.4, 3.1))
        axes.set_title(name, loc="left", fontsize=8)
        axes.text(0.97, 0.8, f"{losses[name][-1] - losses['float32'][-1]:+.3f}", transform=axes.transAxes, ha="right", fontsize=8)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss, nats per character", fontsize=9)
    return figure


def train(name: str) -> list[float]:
    """The mean losses of every few steps."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import torch
    from tutorial_gpt import GPT, Text, loss_of

    import qsim
    from qsim.recipes.named import SHOWN_IN

    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = Text()
    model = GPT(len(text.characters))
    if name != "float32":
        qsim.convert(model, qsim.recipes.resolve(name, SHOWN_IN), exclude=["head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - step / STEPS))
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        loss = loss_of(model, text.batch(generator)[:BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return [round(float(mean), 3) for mean in np.reshape(losses, (-1, EVERY)).mean(1)]


def main() -> None:
    import torch

    import qsim

    names = ("float32", *qsim.recipes.NAMED)
    losses = dict.fromkeys(names) if len(sys.argv) == 1 else json.loads(DATA.read_text(encoding="utf-8"))["losses"]
    for name in sys.argv[1:] or names:
        start = time.process_time()
        losses[name] = train(name)
        print(f"{name:<20} {losses[name][-1]:.3f}  {time.process_time() - start:.0f} s", flush=True)
    ordered = {name: losses[name] for name in names}
    held = {"steps": STEPS, "every": EVERY, "torch": torch.__version__, "qsim": qsim.__version__, "losses": ordered}
    DATA.write_text(json.dumps(held) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
