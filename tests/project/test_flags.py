"""Options that are True or False refuse anything else: a text such as "no" would count as true."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import accumulators, formats, optim, plot, points, recipes, silicon, transforms
from qsim.nn import functional

X, WEIGHT, MODEL = torch.ones(2, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
CIRCUIT = silicon.Circuit("e4m3")
#: How each function and class is called with options that are flags.
CALLS: dict[Any, Callable[..., object]] = {
    qsim.quantize: lambda **flags: qsim.quantize(X, "e4m3", **flags),
    qsim.encode: lambda **flags: qsim.encode(X, "e2m1", **flags),
    qsim.decode: lambda **flags: qsim.decode(torch.ones(2, dtype=torch.uint8), "e2m1", **flags),
    qsim.matmul: lambda **flags: qsim.matmul(X, X.mT, "h100_bf16", **flags),
    qsim.Quantizer: lambda **flags: qsim.Quantizer("e4m3", **flags),
    qsim.Stochastic: qsim.Stochastic,
    qsim.Float: lambda **flags: qsim.Float(4, 3, **flags),
    qsim.Fixed: lambda **flags: qsim.Fixed(8, 4, **flags),
    qsim.Int: lambda **flags: qsim.Int(8, **flags),
    formats.P3109: lambda **flags: formats.P3109(8, 3, **flags),
    formats.Dynamic: formats.Dynamic,
    transforms.Hadamard: lambda **flags: transforms.Hadamard(16, **flags),
    accumulators.BlockScaled: lambda **flags: accumulators.BlockScaled(32, 25, 32, **flags),
    accumulators.TwoStep: lambda **flags: accumulators.TwoStep(4, 24, 31, **flags),
    functional.embedding: lambda **flags: functional.embedding(torch.tensor([0]), X, points="e4m3", **flags),
    functional.scaled_dot_product_attention: lambda **flags: functional.scaled_dot_product_attention(X, X, X, points="e4m3", **flags),
    qsim.convert: lambda **flags: qsim.convert(MODEL, "e4m3", **flags),
    qsim.coverage: lambda **flags: qsim.coverage(MODEL, X, **flags),
    qsim.Schedule: lambda **flags: qsim.Schedule({0: "mxfp8"}, **flags),
    qsim.compare: lambda **flags: qsim.compare(MODEL, MODEL, X, **flags),
    qsim.diagnostics.trace: lambda **flags: qsim.diagnostics.trace(MODEL, X, **flags),
    qsim.diagnostics.Monitor: lambda **flags: qsim.diagnostics.Monitor(MODEL, **flags),
    qsim.save: lambda **flags: qsim.save(MODEL, Path("nowhere"), **flags),
    qsim.load: lambda **flags: qsim.load(MODEL, Path("nowhere"), **flags),
    qsim.export: lambda **flags: qsim.export(MODEL, Path("nowhere"), **flags),
    qsim.distributed.AllReduce: qsim.distributed.AllReduce,
    optim.SGD: lambda **flags: optim.SGD([WEIGHT], 0.1, **flags),
    optim.Adam: lambda **flags: optim.Adam([WEIGHT], **flags),
    optim.AdamW: lambda **flags: optim.AdamW([WEIGHT], **flags),
    points.Codebook: lambda **flags: points.Codebook([0.0, 1.0], **flags),
    plot.number_line: lambda **flags: plot.number_line("e2m1", **flags),
    recipes.fp4_dge: recipes.fp4_dge,
    recipes.torchao_rowwise: recipes.torchao_rowwise,
    silicon.emit: lambda **flags: silicon.emit("systemverilog", "e4m3", **flags),
    silicon.emit_circuits: lambda **flags: silicon.emit_circuits("systemverilog", [CIRCUIT], **flags),
    silicon.cost: lambda **flags: silicon.cost(CIRCUIT, **flags),
}
#: Modules whose `__all__` is public.
ROOMS = (qsim, accumulators, formats, optim, plot, points, recipes, silicon, transforms, functional, qsim.diagnostics, qsim.distributed)


def flags_of(function: Any) -> list[str]:
    """The options of a function or class that are True or False by default."""
    return [name for name, parameter in inspect.signature(function).parameters.items() if isinstance(parameter.default, bool)]


def functions() -> Iterator[Any]:
    """The public functions and the classes that users create: records of results are created by qsim."""
    for room in ROOMS:
        for name in room.__all__:
            found = getattr(room, name)
            is_record = isinstance(found, type) and issubclass(found, (tuple, Exception, *RESULTS))
            if (inspect.isfunction(found) or isinstance(found, type)) and not is_record:
                yield found


RESULTS = (qsim.diagnostics.Operation, qsim.diagnostics.Problem, qsim.diagnostics.Updates)


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_a_text_is_no_flag(function: Any) -> None:
    flags = flags_of(function)
    assert flags
    for name in flags:
        for value in ("no", 1, None):
            said = rf"^\w+: {name} must be True(, False or 'flush'| or False), got {value!r}"
            with pytest.raises((TypeError, ValueError), match=said):
                CALLS[function](**{name: value})


def test_all_public_functions_with_flags_are_tried() -> None:
    assert {found.__qualname__ for found in functions() if flags_of(found)} - {found.__qualname__ for found in CALLS} == set()
