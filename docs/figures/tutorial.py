"""Loss of a small GPT on held-out text, in four precisions. The numbers are those that `examples/tutorial_gpt.py` wrote."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

NAMES = {"float32": "float32", "bf16": "BF16, stochastic updates", "fp8": "FP8 (fp8_hybrid)", "fp4": "FP4 (nvfp4)"}


def draw() -> Figure:
    results = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    steps = np.arange(1, results["steps"] // results["every"] + 1) * results["every"]
    losses = {name: np.array([run["validation"] for run in results["runs"] if run["method"] == name]) for name in NAMES}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    left.plot(steps, losses["float32"].mean(0), linewidth=5, alpha=0.3, color=plt.rcParams["text.color"], label="float32")
    right.axhline(0, linewidth=5, alpha=0.3, color=plt.rcParams["text.color"])
    for name in ("bf16", "fp8", "fp4"):
        (line,) = left.plot(steps, losses[name].mean(0), linewidth=1.4, label=NAMES[name])
        off = losses[name] - losses["float32"]
        right.plot(steps, off.mean(0), color=line.get_color())
        right.fill_between(steps, off.min(0), off.max(0), color=line.get_color(), alpha=0.25, linewidth=0)
    left.set(xlabel="step", ylabel="nats per character")
    left.set_title("Loss on held-out text", loc="left")
    left.legend()
    right.set(xlabel="step")
    right.set_title("Difference from float32, same seed", loc="left")
    return figure
