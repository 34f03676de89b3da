"""A GPT compiled block by block, in several recipes: graphs, the first step with cold caches, and steps compared with native's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import qsim
from qsim import recipes
from qsim.cli.bench._counting import allocated, peak
from qsim.cli.bench._models import LAST, Subject
from qsim.cli.bench._options import BenchSettings
from qsim.cli.bench._timing import Call, duration, sustained, training_step
from qsim.cli.text import words
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

NATIVE = "native"
BACKEND = "inductor"
#: The recipes that are measured by default.
RECIPES = "native,fp8_hybrid,mxfp8,mxfp4,nvfp4"

COLUMNS: Values = {
    "recipe": "recipe",
    "graphs": Quantity("graphs"),
    "recompilations": Quantity("recompilations"),
    "first step s": Quantity("first_seconds", 1),
    "ms per step": Quantity("milliseconds", 1),
    "time to native's": Quantity("ratio", 2),
    "peak MiB": Quantity("peak_mib", missing="not measured"),
}


def compared(text: str, option: str) -> list[str]:
    """The recipes of the option `--recipes`; native comes first, because others are compared with it."""
    chosen = [name for name in words(text, option) if name != NATIVE]
    for name in chosen:
        recipes.resolve(name)
    return [NATIVE, *chosen]


def rows(subject: Subject, chosen: BenchSettings) -> Iterator[Row]:
    """Measure a GPT whose blocks are compiled one by one, without points and with those of recipes.

    Each variant's first step finds an empty cache of Inductor's and Triton's. Then steps of all variants alternate in turns.
    """
    torch.compile(torch.neg)(torch.ones((), device=chosen.device))  # what a compiler does once is not the first variant's
    variants = [_compiled(name, subject, chosen) for name in chosen.recipes]
    times = sustained([step for step, _, _ in variants], chosen.clock, chosen.seconds)
    for (step, row, own), time in zip(variants, times, strict=True):
        yield {**row, "milliseconds": time * 1e3, "ratio": time / times[0], "peak_mib": peak(step, own, chosen.device)}


def _compiled(name: str, subject: Subject, chosen: BenchSettings) -> tuple[Call, Row, int]:
    """Build a model, compile its blocks in its first step, and take a second one, which compiles nothing if all is well.

    Returns:
        The step; its graphs, recompilations and first time; and the memory that the model, its gradients and its optimizer occupy.
    """
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
    from torch._inductor.utils import fresh_inductor_cache

    torch._dynamo.reset()
    clear_compilation_metrics()
    before = allocated(chosen.device)
    model, batch, _ = subject.make(chosen.device, chosen.dtype)
    if name != NATIVE:
        qsim.convert(model, name, exclude=[LAST])
    counter = CompileCounterWithBackend(BACKEND)
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        block.compile(backend=counter, dynamic=False)
    step = training_step(model, batch)
    with fresh_inductor_cache():
        seconds = duration(step, chosen.clock)
        step()
    again = sum(bool(metrics.recompile_reason) for metrics in get_compilation_metrics())
    row = {"recipe": name, "graphs": counter.frame_count, "recompilations": again, "first_seconds": seconds}
    return step, row, allocated(chosen.device) - before
