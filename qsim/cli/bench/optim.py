"""Measure optimizer steps: AdamW with every update, SGD, and the stochastic copy, on one tensor and on the many tensors of a GPT.

Weights and gradients are bf16. The bandwidth of each step is compared with a copy of as many bytes, timed alternately: a ratio of
1 means as fast as copying. A step must read and write weights, moments and compensations, and read gradients. On a GPU the launches of a
step are counted and the host's time for it is measured; on the CPU, where the host does the work, neither is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim.cli.bench._counting import launches
from qsim.cli.bench._measured import Measured, beside_copy
from qsim.cli.bench._options import DTYPES, BenchOption, BenchSettings, among, count_text, one_of, shared
from qsim.cli.bench._timing import Call, host_time
from qsim.studies.learners.gpt import GPTSize, TransformerBlock
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

#: So low that a few hundred steps leave the weights near their initial values.
LEARNING_RATE = 1e-5
#: As GPTs are trained. Moments in bfloat16 can shrink with these, even when rounded to nearest.
BETAS = (0.9, 0.95)

#: By size: the name of a GPT, its number of blocks, and their width.
GPTS = {"medium": ("GPT-2 medium", 24, 1024), "tiny": ("a tiny GPT", 2, 64)}

#: The number of consecutive steps whose time on the host is measured: few enough that no full CUDA stream makes the host wait.
BATCH = 20
COLUMNS: Values = {
    "tensors": "tensors",
    "algorithm": "algorithm",
    "update": "update",
    "states": "states",
    "ms": Quantity("milliseconds", 3),
    "GB/s": Quantity("gb_per_s", 1),
    "launches": Quantity("launches", missing="not measured"),
    "host µs": Quantity("host_microseconds", missing="not measured"),
    "ratio": Quantity("ratio", 3),
}


@dataclass(frozen=True)
class ParameterSet:
    """Parameters that are updated together.

    Attributes:
        label: Their name in tables.
        shapes: Their shapes.
    """

    label: str
    shapes: Sequence[tuple[int, ...]]

    @property
    def elements(self) -> int:
        """The total number of elements."""
        return sum(map(prod, self.shapes))

    def normal(self, chosen: BenchSettings, dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these shapes with normally distributed values."""
        return [chosen.normal(dtype, prod(shape)).view(shape) for shape in self.shapes]

    def parameters(self, chosen: BenchSettings) -> list[nn.Parameter]:
        """Parameters in bfloat16, with gradients."""
        parameters = [nn.Parameter(x) for x in self.normal(chosen, torch.bfloat16)]
        for parameter in parameters:
            # In a different order, so that a gradient is not equal to its weight.
            parameter.grad = parameter.detach().flatten().flip(0).view_as(parameter)
        return parameters


def one(elements: int) -> ParameterSet:
    """One tensor.

    Example:
        >>> one(2**27).label
        '1 of 2^27'
    """
    return ParameterSet(f"1 of {count_text(elements)}", [(elements,)])


def gpt(size: str) -> ParameterSet:
    """The parameters of a GPT's blocks, without embeddings.

    Example:
        >>> found = gpt("medium")
        >>> found.label, found.elements
        ('288 of GPT-2 medium', 302309376)
    """
    name, layers, width = GPTS[size]
    with torch.device("meta"):
        block = TransformerBlock(GPTSize(1, width, 16))
    shapes = [tuple(parameter.shape) for parameter in block.parameters()] * layers
    return ParameterSet(f"{len(shapes)} of {name}", shapes)


@dataclass(frozen=True)
class OptimizerWork:
    """An optimizer step or a copy to measure.

    Attributes:
        algorithm: Its name in tables.
        update: The rounding of weights.
        states: The short name of its states' dtype; "-" if it has none.
        prepare: A function that creates tensors, and returns the call and the number of bytes that it must move.
    """

    algorithm: str
    update: str
    states: str
    prepare: Callable[[ParameterSet, BenchSettings], tuple[Call, int]]


def moved(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of a step: weights and their states are read and written, gradients are read. Step counters are not included."""
    found = 0
    for parameter in optimizer.param_groups[0]["params"]:
        kept = [state for name, state in optimizer.state[parameter].items() if name != "step"]
        found += parameter.grad.nbytes + 2 * sum(x.nbytes for x in (parameter, *kept))
    return found


def _copies(tensors: ParameterSet, chosen: BenchSettings) -> tuple[Call, int]:
    sources = tensors.normal(chosen, torch.float32)
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            qsim.optim.copy_fp32_to_bf16_stochastic_(target, source)

    return copy, sum(x.nbytes for x in (*sources, *targets))


def _work(
    algorithm: str, update: str = "stochastic", states: str = "bf16", *, make: Callable[..., Any] = qsim.optim.AdamW, **options: Any
) -> OptimizerWork:
    def prepare(tensors: ParameterSet, chosen: BenchSettings) -> tuple[Call, int]:
        own = {"lr": LEARNING_RATE, "update": update, "state": DTYPES[states], **({"betas": BETAS} if make is qsim.optim.AdamW else {})}
        optimizer = make(tensors.parameters(chosen), **own, **options)
        optimizer.step()  # which creates its states
        return optimizer.step, moved(optimizer)

    return OptimizerWork(algorithm, update, states, prepare)


#: The works to measure, by their names on the command line.
WORK: dict[str, list[OptimizerWork]] = {
    "adamw": [_work("AdamW", update, states) for update in ("stochastic", "kahan", "nearest") for states in ("bf16", "fp32")],
    "adamw-moments": [_work("AdamW, stochastic moments", state_rounding="stochastic")],
    "adamw-e4m3": [_work("AdamW, E4M3 weights", format="e4m3")],
    "sgd": [_work("SGD, momentum", make=qsim.optim.SGD, momentum=0.9)],
    "copy": [OptimizerWork("fp32→bf16 copy", "stochastic", "-", _copies)],
}

OPTIONS = {
    "tensors": BenchOption("A,B", "", among(("one", "gpt")), "one,gpt"),
    "size": BenchOption("NAME", f"size of the GPT: {', '.join(GPTS)}; medium is GPT-2's", one_of(GPTS), ("medium", "tiny")),
    "algorithms": BenchOption("A,B", "", among(WORK), ",".join(WORK)),
    **shared(repeats=("20", "5"), elements=("2^27", "2^20")),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure the steps of all algorithms on all tensors."""
    sets = [one(chosen.elements) if name == "one" else gpt(chosen.size) for name in chosen.tensors]
    works = [work for name in chosen.algorithms for work in WORK[name]]
    return Measured(chosen.heading(), {"": (COLUMNS, steps(chosen, sets, works))})


def steps(chosen: BenchSettings, sets: Sequence[ParameterSet], works: Sequence[OptimizerWork]) -> Iterator[Row]:
    """Measure each work on each set of tensors."""
    pairs = [(tensors, work) for tensors in sets for work in works]
    rows = [_timed(tensors, work, chosen) for tensors, work in pairs]
    if chosen.is_cuda:
        # After all timings, because the profiler that counts launches slows down later ones.
        for row, (tensors, work) in zip(rows, pairs, strict=True):
            row["launches"] = launches(work.prepare(tensors, chosen)[0])
    yield from rows


def _timed(tensors: ParameterSet, work: OptimizerWork, chosen: BenchSettings) -> Row:
    call, bytes_moved = work.prepare(tensors, chosen)
    row: Row = {"part": "steps", "tensors": tensors.label, "count": len(tensors.shapes), "elements": tensors.elements}
    row |= {"algorithm": work.algorithm, "update": work.update, "states": work.states, "launches": None, "host_microseconds": None}
    row |= beside_copy(call, bytes_moved, chosen)
    row["milliseconds"] = row["seconds"] * 1e3
    if chosen.is_cuda:
        (host,) = host_time([call], chosen.clock, chosen.repeats, BATCH)
        row["host_microseconds"] = host * 1e6
    return row
