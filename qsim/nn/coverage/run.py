"""One run of a model that records its products, and leaves no trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qsim.formats.base import check_flag
from qsim.functional.arguments import check_model
from qsim.nn.coverage.recording import Recorder
from qsim.nn.coverage.report import Coverage
from qsim.nn.examples import inputs_of
from qsim.nn.product import observers
from qsim.nn.restoring import Snapshot, generators_restored
from qsim.private import is_compiled
from qsim_kernels.private import tree_leaves


def coverage(model: nn.Module, example: Any, *, backward: bool = True) -> Coverage:
    """Run a model once, and report each of its products: its multiply-adds, and the points that rounded its operands, or why none did.

    Whatever torch dispatches is recorded, wherever it is called: in layers with points, in layers that were left alone, through functions
    on parameters, and between activations. The model and torch's generators are unchanged afterwards, and no gradient is accumulated.
    With a model and inputs on torch's `meta` device nothing is computed. Reentrant checkpointing does not work with `backward=True`.

    Multiply-adds follow torch's formulas for its FLOP counter, divided by two. Products that it does not count are added: attention on a
    CPU, grouped, recurrent and bilinear products, and those of vectors. The gradient of a grouped convolution's weight counts
    its groups only, which torch's formula does not. Lookups in embeddings multiply nothing.

    Args:
        model: The model, converted or not.
        example: Its inputs: a tuple of them, a dictionary of inputs by keyword, or one input.
        backward: Whether to compute gradients: of `.loss`, if the model returns one, and otherwise of the sum of its floating-point
            outputs, with respect to parameters and inputs that require them.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If it is compiled, has lazy layers, is wrapped for data parallelism, or multiplies nothing; or if no output requires a
            gradient, unless `backward=False`.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = qsim.convert(model, qsim.FivePoint(act="e4m3", weight="e4m3", grad="e5m2", act_bwd="same"), exclude="2")
        >>> print(qsim.coverage(model, torch.ones(3, 4)))
        336 multiply-adds; both operands rounded: 57.14 %, one of them: 0 %
        module  pass      operator  operands  calls  multiply-adds  rounded at
        0       forward   addmm     3×4, 4×8  1      96             act=e4m3, weight=e4m3
        2       forward   addmm     3×8, 8×2  1      48             left alone: not chosen
        2       backward  mm        3×2, 2×8  1      48             left alone: not chosen
        2       backward  mm        2×3, 3×8  1      48             left alone: not chosen
        0       backward  mm        8×3, 3×4  1      96             grad=e5m2, act_bwd=e4m3
    """
    check_plain("coverage", model)
    check_flag("coverage", "backward", backward)
    args, kwargs = inputs_of(example)
    recorder = Recorder(model)
    snapshot = Snapshot(model)
    try:
        with generators_restored(model), observers.hold(recorder), recorder.paths.followed(), recorder:
            if backward:
                with torch.enable_grad():
                    _differentiate(model(*args, **kwargs), [*model.parameters(), *tree_leaves((args, dict(kwargs)))])
            else:
                model(*args, **kwargs)
    finally:
        snapshot.restore()
    found = recorder.result()
    if not found.multiply_adds:
        inside = f"; operators that may multiply inside: {', '.join(found.opaque)}" if found.opaque else ""
        raise ValueError(f"coverage: the model multiplies nothing with these inputs{inside}")
    return found


def check_plain(owner: str, model: nn.Module) -> None:
    """Raise an error for a model whose operations cannot be followed: a compiled one, a wrapped one, or one with lazy layers.

    Args:
        owner: The function that follows them, for the error.
        model: The model.
    """
    check_model(owner, model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(f"{owner}: the model is wrapped in DistributedDataParallel, which would wait for gradients: give model.module")
    for name, module in model.named_modules():
        title = f"its module {name!r}" if name else "the model"
        if is_compiled(module):
            raise ValueError(f"{owner}: {title} is compiled, and compiled code does not report its products: give the uncompiled model")
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise ValueError(f"{owner}: {title} is lazy and has seen no input: call the model once before")


def summands(owner: str, output: Any) -> list[Tensor]:
    """The loss of an output, if it has one, or the sums of its tensors: what a gradient is computed of.

    Raises:
        ValueError: If no output requires a gradient.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    found = [x for x in tree_leaves(loss if isinstance(loss, Tensor) else output) if isinstance(x, Tensor)]
    sums = [x.sum() for x in found if x.is_floating_point() and x.requires_grad]
    if not sums:
        raise ValueError(f"{owner}: no output requires a gradient: give backward=False")
    return sums


def _differentiate(output: Any, inputs: list[Any]) -> None:
    """Compute the gradients of an output, without accumulating them."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.grad(summands("coverage", output), wanted, allow_unused=True)
