"""A function as one operator: computed in full precision, and rounded once, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from qsim.functional.fpu.mode import FULL_PRECISION, innermost
from qsim.functional.fpu.output import Output
from qsim.private import forward_level, keeps_graph
from qsim_kernels.private import is_in_transform, tree_flatten, tree_map, tree_unflatten


@dataclass
class _Inner:
    """The computation of a function from detached inputs, so that its gradients end there.

    Tensors that its graph saves for the backward pass are stored by the outer node instead. So checkpoints and other
    hooks see one operator, and recomputation repeats its rounding.

    Attributes:
        inputs: The detached inputs.
        outputs: The results.
        saved: The tensors that the graph saved, while they are available.
        is_recorded: Whether gradients of gradients go through the graph, which is then not freed.
    """

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    saved: Sequence[Tensor] = field(default_factory=list)
    is_recorded: bool = False

    def pack(self, x: Tensor) -> int:
        """Store a tensor of the inner graph."""
        self.saved = [*self.saved, x.detach()]
        return len(self.saved) - 1

    def unpack(self, place: int) -> Tensor:
        """Return a stored tensor."""
        return self.saved[place]


def once(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Output | None) -> Any:
    """Call a function of tensors, and round its results.

    Args:
        function: A function of torch, or a similar one: its results depend only on the tensors among its arguments.
        args: Its arguments.
        kwargs: Its keyword arguments.
        output: The rounding of its results and, in the backward pass, of the gradients of its arguments; `None`: no rounding.

    Raises:
        NotImplementedError: Under the transforms of torch.func and in forward mode.
    """
    flat, structure = tree_flatten((args, kwargs))
    watched = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
    if is_in_transform() or forward_level() >= 0:
        raise NotImplementedError(
            f"fpu: {getattr(function, '__name__', function)} rounds once, which does not work under the transforms of torch.func or in "
            "forward mode; take gradients with backward() or torch.autograd.grad, or write the function in separate operators"
        )
    if not torch.is_grad_enabled() or not watched:
        with FULL_PRECISION:
            results = function(*args, **kwargs)
        return results if output is None else tree_map(output.of, results)
    inner = _Inner([flat[i].view_as(flat[i]) for i in watched])
    given = list(flat)
    for i, x in zip(watched, inner.inputs, strict=True):
        given[i] = x
    args, kwargs = tree_unflatten(given, structure)
    with FULL_PRECISION, saved_tensors_hooks(inner.pack, inner.unpack):
        results, shape = tree_flatten(function(*args, **kwargs))
    tracked = [i for i, x in enumerate(results) if isinstance(x, Tensor) and x.requires_grad]
    rounded = [x if i in tracked or output is None else output.of(x) for i, x in enumerate(results)]
    if tracked:
        inner.outputs = [results[i] for i in tracked]
        found = _Once.apply(inner, output, *(flat[i] for i in watched))  # type: ignore[no-untyped-call]
        for i, x in zip(tracked, found, strict=True):
            rounded[i] = x
    return tree_unflatten(rounded, shape)


class _Once(torch.autograd.Function):
    """The outer node of an inner graph: its results and its gradients, each rounded once."""

    @staticmethod
    def forward(ctx: Any, inner: _Inner, output: Output | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inner, ctx.output = inner, output
        ctx.save_for_backward(*inner.saved)
        inner.saved = ()
        outputs = [x.detach() for x in inner.outputs]
        return tuple(outputs if output is None else [output.of(x) for x in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inner: _Inner = ctx.inner
        inner.saved = ctx.saved_tensors
        mode = innermost()
        inner.is_recorded |= torch.is_grad_enabled()
        with FULL_PRECISION:
            found = torch.autograd.grad(
                inner.outputs,
                inner.inputs,
                gradients,
                retain_graph=inner.is_recorded or keeps_graph(),
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        if not inner.is_recorded:
            inner.saved = ()
        if mode is not None and mode.output is not None and ctx.output is not None:
            found = tuple(mode.output.of(x) for x in found)
        return None, None, *found
