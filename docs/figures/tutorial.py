"""Loss of a small GPT on held-out text in four precisions (`loss`), and its difference from float32 (`difference`).

The numbers are those that `examples/tutorial_gpt.py` wrote.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

NAMES = {"float32": "float32", "bf16": "BF16, stochastic updates", "fp8": "FP8 (fp8_hybrid)", "fp4": "FP4 (nvfp4)"}


def draw(part: str) -> Figure:
    results = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    steps = np.arange(1, results["steps"] // results["every"] + 1) * results["every"]
    losses = {name: np.array([run["validation"] for run in results["runs"] if run["method"] == name]) for name in NAMES}
    figure, axes = plt.subplots(figsize=(3.7, 2.9))
    text = {"linewidth": 5, "alpha": 0.3, "color": plt.rcParams["text.color"]}
    if part == "loss":
        axes.plot(steps, losses["float32"].mean(0), label="float32", **text)
        for name in ("bf16", "fp8", "fp4"):
            axes.plot(steps, losses[name].mean(0), linewidth=1.4, label=NAMES[name])
        axes.set_title("Loss on held-out text (nats per character)", loc="left")
        axes.legend()
    else:
        axes.axhline(0, **text)
        for name in ("bf16", "fp8", "fp4"):
            off = losses[name] - losses["float32"]
            (line,) = axes.plot(steps, off.mean(0), label=NAMES[name])
            axes.fill_between(steps, off.min(0), off.max(0), color=line.get_color(), alpha=0.25, linewidth=0)
        axes.set_title("Difference from float32, same seed", loc="left")
    axes.set_xlabel("step")
    return figure
