"""The tensors on which optimizers are measured, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

import qsim
from qsim.cli.bench._settings import DTYPES, BenchSettings, count_text
from qsim.cli.bench._timing import Call
from qsim.studies.learners.gpt import GPTSize, TransformerBlock

#: So low that a few hundred steps leave the weights near their initial values.
LEARNING_RATE = 1e-5
#: As GPTs are trained. Moments in bfloat16 can shrink with these, even when rounded to nearest.
BETAS = (0.9, 0.95)

#: By size: the name of a GPT, its number of blocks, and their width.
GPTS = {"medium": ("GPT-2 medium", 24, 1024), "tiny": ("a tiny GPT", 2, 64)}

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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

    def normal(self, settings: BenchSettings, dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these shapes with normally distributed values."""
        return [settings.normal(dtype, prod(shape)).view(shape) for shape in self.shapes]

    def parameters(self, settings: BenchSettings) -> list[nn.Parameter]:
        """Parameters in bfloat16, with gradients."""
        parameters = [nn.Parameter(x) for x in self.normal(settings, torch.bfloat16)]
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


def started(make: MakeOptimizer, tensors: ParameterSet, settings: BenchSettings) -> torch.optim.Optimizer:
    """A new optimizer after its first step, which creates its states."""
    optimizer = make(tensors.parameters(settings))
    optimizer.step()
    return optimizer


def moved(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of a step: weights and their states are read and written, gradients are read. Step counters are not included."""
    found = 0
    for parameter in optimizer.param_groups[0]["params"]:
        kept = [state for name, state in optimizer.state[parameter].items() if name != "step"]
        found += parameter.grad.nbytes + 2 * sum(x.nbytes for x in (parameter, *kept))
    return found


def adamw(update: str, states: str, weight: str | None = None, state_rounding: str = "nearest") -> MakeOptimizer:
    """Create qsim's AdamW."""
    options = {"update": update, "state": DTYPES[states], "format": weight, "state_rounding": state_rounding}
    return partial(qsim.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, **options)  # type: ignore[arg-type]


def _copies(tensors: ParameterSet, settings: BenchSettings) -> tuple[Call, int]:
    sources = tensors.normal(settings, torch.float32)
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            qsim.optim.copy_fp32_to_bf16_stochastic_(target, source)

    return copy, sum(x.nbytes for x in (*sources, *targets))


def _work(algorithm: str, update: str, states: str, make: MakeOptimizer) -> OptimizerWork:
    def prepare(tensors: ParameterSet, settings: BenchSettings) -> tuple[Call, int]:
        optimizer = started(make, tensors, settings)
        return optimizer.step, moved(optimizer)

    return OptimizerWork(algorithm, update, states, prepare)


_SGD = partial(qsim.optim.SGD, lr=LEARNING_RATE, momentum=0.9, update="stochastic", state=torch.bfloat16)

#: The works to measure, by their names on the command line.
WORK: dict[str, list[OptimizerWork]] = {
    "adamw": [
        _work("AdamW", update, states, adamw(update, states))
        for update in ("stochastic", "kahan", "nearest")
        for states in ("bf16", "fp32")
    ],
    "adamw-moments": [_work("AdamW, stochastic moments", "stochastic", "bf16", adamw("stochastic", "bf16", state_rounding="stochastic"))],
    "adamw-e4m3": [_work("AdamW, E4M3 weights", "stochastic", "bf16", adamw("stochastic", "bf16", "e4m3"))],
    "sgd": [_work("SGD, momentum", "stochastic", "bf16", _SGD)],
    "copy": [OptimizerWork("fp32→bf16 copy", "stochastic", "-", _copies)],
}
