"""A GPT compiled block by block, in several recipes: graphs, the first step with cold caches, and steps compared with native's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

import qsim
from qsim import recipes
from qsim.cli.bench._conditions import Conditions
from qsim.cli.bench._models import Subject
from qsim.cli.bench._steps import peak_growth
from qsim.cli.bench._timing import Call, clock_of, duration, sustained
from qsim.text.lists import words
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

NATIVE = "native"
BACKEND = "inductor"
#: The recipes that are measured by default.
RECIPES = (NATIVE, "fp8_hybrid", "mxfp8", "mxfp4", "nvfp4")
MIB = 2**20

COLUMNS: Values = {
    "recipe": "recipe",
    "graphs": Quantity("graphs"),
    "recompilations": Quantity("recompilations"),
    "first step s": Quantity("first_seconds", 1),
    "ms per step": Quantity("milliseconds", 1),
    "time to native's": Quantity("ratio", 2),
    "peak MiB": Quantity("peak_mib", missing="not measured"),
}


def names(given: str) -> list[str]:
    """The recipes of the option `--recipes`; native comes first, because others are compared with it."""
    chosen = words(given)
    for name in chosen:
        if name != NATIVE:
            recipes.resolve(name)
    return [NATIVE, *(name for name in dict.fromkeys(chosen) if name != NATIVE)]


def measure(subject: Subject, chosen: Sequence[str], conditions: Conditions) -> Iterator[Row]:
    """Measure a GPT whose blocks are compiled one by one, without points and with those of recipes.

    Each variant's first step finds an empty cache of Inductor's and Triton's. Then steps of all variants alternate in turns.
    """
    torch.compile(torch.neg)(torch.ones((), device=conditions.device))  # what a compiler does once is not the first variant's
    variants = [_compiled(name, subject, conditions) for name in chosen]
    times = sustained([step for step, _, _ in variants], clock_of(conditions.device), conditions.seconds)
    for (step, row, own), time in zip(variants, times, strict=True):
        peak = (own + peak_growth(step)) / MIB if conditions.is_cuda else None
        yield {**row, "milliseconds": time * 1e3, "ratio": time / times[0], "peak_mib": peak}


def _compiled(name: str, subject: Subject, conditions: Conditions) -> tuple[Call, Row, int]:
    """Build a model, compile its blocks in its first step, and take a second one, which compiles nothing if all is well.

    Returns:
        The step; its graphs, recompilations and first time; and the memory that the model, its gradients and its optimizer occupy.
    """
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
    from torch._inductor.utils import fresh_inductor_cache

    torch._dynamo.reset()
    clear_compilation_metrics()
    before = torch.cuda.memory_allocated(conditions.device) if conditions.is_cuda else 0
    model, batch, _ = subject.make(conditions.device, conditions.dtype)
    if name != NATIVE:
        qsim.convert(model, name, exclude=["head"])
    counter = CompileCounterWithBackend(BACKEND)
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        block.compile(backend=counter, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with fresh_inductor_cache():
        seconds = duration(step, clock_of(conditions.device))
        step()
    again = sum(bool(metrics.recompile_reason) for metrics in get_compilation_metrics())
    own = torch.cuda.memory_allocated(conditions.device) - before if conditions.is_cuda else 0
    return step, {"recipe": name, "graphs": counter.frame_count, "recompilations": again, "first_seconds": seconds}, own
