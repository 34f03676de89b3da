"""A compiled GPT in several recipes: graphs, the first step with cold caches, and steps compared with native's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import qsim
from qsim import private, recipes
from qsim.cli.bench._counting import allocated, peak
from qsim.cli.bench._models import LAST, Subject
from qsim.cli.bench._options import BenchSettings
from qsim.cli.bench._timing import Call, duration, sustained, training_step
from qsim.cli.text import words
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

NATIVE = "native"
BACKEND = "inductor"
#: Ways to compile a model of equal blocks so that these are compiled once: each by itself, and as regions of one graph.
BLOCKS, REGIONS = "blocks", "regions"
#: The recipes that are compared in these ways by default.
RECIPES = "native,fp8_hybrid,mxfp8,mxfp4,nvfp4"

COLUMNS: Values = {
    "recipe": "recipe",
    "graphs": Quantity("graphs"),
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
    """Measure a compiled GPT without points and with those of recipes.

    Each variant's first step finds an empty cache of Inductor's and Triton's. Then steps of all variants alternate in turns.
    """
    torch.compile(torch.neg)(torch.ones((), device=chosen.device))  # what a compiler does once is not the first variant's
    variants = [_begun(name, subject, chosen) for name in chosen.recipes]
    times = sustained([step for step, _, _ in variants], chosen.clock, chosen.seconds)
    for (step, row, own), time in zip(variants, times, strict=True):
        yield {**row, "milliseconds": time * 1e3, "ratio": time / times[0], "peak_mib": peak(step, own, chosen.device)}


def _begun(name: str, subject: Subject, chosen: BenchSettings) -> tuple[Call, Row, int]:
    """Build a model, compile it in its first step, and take a second one, which compiles nothing if all is well.

    Returns:
        The step; its graphs and first time; and the memory that the model, its gradients and its optimizer occupy.
    """
    private.compiler_counters.clear()
    before = allocated(chosen.device)
    model, batch, _ = subject.make(chosen.device, chosen.dtype)
    if name != NATIVE:
        qsim.convert(model, name, exclude=[LAST])
    step = training_step(model, batch, _compiled(model, chosen.compile))
    with private.fresh_inductor_cache():
        seconds = duration(step, chosen.clock)
        step()
    row = {"recipe": name, "graphs": private.compiler_counters["stats"]["unique_graphs"], "first_seconds": seconds}
    return step, row, allocated(chosen.device) - before


def _compiled(model: nn.Module, way: str) -> Callable[..., Any]:
    """A model's call as compiled code, which compiles when it is first called."""
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    if way == BLOCKS:
        for block in blocks:
            block.compile(backend=BACKEND, dynamic=False)
        return model
    if way == REGIONS:
        kind = type(blocks[0])
        region = type("Region", (kind,), {"forward": torch.compiler.nested_compile_region(kind.forward)})
        for block in blocks:
            block.__class__ = region
        return torch.compile(model, backend=BACKEND, dynamic=False)
    return torch.compile(model, mode=way, dynamic=False)
