"""Operators that compute every element by itself, which compilers fuse with their neighbours.

Each is a function in plain torch. In a graph that Inductor compiles, a call is a single node, and the same function writes Inductor's
loops: the fewer nodes a graph has, the sooner it is compiled. Other graphs hold the torch operators that the function calls.

Inductor computes an element again wherever it is read, if that looks cheap. A tensor with one scale is read for the scale, and again to be
rounded; the gradient of a result is rounded in one kernel and summed in another. GELU and its gradient would be computed twice. Compiled
code holds such tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor, sizes
from qsim_kernels.ops.backend import define as define_operator, library


def fusible(schema: str, *, held: bool = True) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define an operator by the function that computes it.

    Args:
        schema: The operator's schema. Its first argument has the result's shape, with which the other tensors broadcast, and its last is
            the result's dtype.
        held: Whether the result is kept in memory. Every view of one that is not computes it again.
    """
    name = define_operator(schema, lambda x, *given: torch.empty_like(x, dtype=given[-1]), torch.Tag.flexible_layout)
    operator = getattr(torch.ops.qsim, name)

    def define(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        library.impl(name, function, "CompositeExplicitAutograd")

        @wraps(function)
        def called(x: Tensor, *arguments: object) -> Tensor:
            if not inductor.generates(x.device):
                return function(x, *arguments)
            inductor.learn(operator, function, held=held)
            return operator.default(x, *arguments)  # type: ignore[no-any-return]

        return called

    return define


for _schema in ("in_memory(Tensor x)", "again(Tensor x, bool is_kept)", "with_seeds(Tensor x, Tensor?[] seeds, bool shares_signs)"):
    _name = define_operator(f"{_schema} -> Tensor", lambda x, *_: x.new_empty_strided(x.shape, x.stride()))
    library.impl(_name, lambda x, *_: x.clone(), "CompositeExplicitAutograd")
define_operator("amax_whole(Tensor x, int[] dim) -> Tensor", torch.amax)
library.impl("amax_whole", lambda x, dim: x.amax(dim), "CompositeExplicitAutograd")
define_operator("of_stream(Tensor seed, Tensor stream, ScalarType dtype) -> Tensor", lambda seed, *_: torch.empty_like(seed))
#: The integers of a dtype's size, in bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_memory(x: Tensor) -> Tensor:
    """A tensor, and in a graph that Inductor compiles the same tensor in memory."""
    if not inductor.generates(x.device):
        return x
    inductor.learn_to_hold(torch.ops.qsim.in_memory)
    return torch.ops.qsim.in_memory.default(x)  # type: ignore[no-any-return]


def amax_whole(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """The largest element of a small tensor along some dimensions; Inductor computes each in a single program."""
    if not inductor.generates(x.device):
        return x.amax(dim)
    inductor.learn_whole(torch.ops.qsim.amax_whole, torch.ops.aten.amax.default)
    return torch.ops.qsim.amax_whole.default(x, dim)  # type: ignore[no-any-return]


def with_seeds(x: Tensor, seeds: Sequence[Tensor | None], shares_signs: bool) -> Tensor | None:
    """A result of the forward pass that depends on seeds which the backward pass needs, too; Inductor takes the same memory for it.

    Where only the backward pass needs a seed, AOTAutograd draws one there, or in each pass: operands rounded there would not share random
    signs. It keeps what the seed depends on, such as the stream, which is on the CPU, where CUDA graphs have no results.
    """
    if not (shares_signs or inductor.records_graphs()):
        return x.view_as(x)
    if inductor.generates(x.device):
        inductor.learn_to_hold(torch.ops.qsim.with_seeds)
    return None


def _seed_of_stream(seed: Tensor, stream: Tensor, dtype: torch.dtype) -> Tensor:
    return seed + stream


library.impl("of_stream", _seed_of_stream, "CompositeExplicitAutograd")


def of_stream(seed: Tensor, stream: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A seed of a layer's stream, a number on the CPU that is an input of the graph.

    For CUDA graphs, Inductor moves such inputs of torch's own operators to the GPU, even those that the forward pass keeps for the backward
    pass, which is compiled to read them on the CPU. It does not know this operator. A recorded graph keeps the number that it was recorded
    with.
    """
    if not inductor.compiles():
        return _seed_of_stream(seed, stream, dtype)
    if inductor.generates(seed.device):
        inductor.learn(torch.ops.qsim.of_stream, _seed_of_stream, held=False, computed_again=False)
    return None


def again(x: Tensor, is_kept: bool) -> Tensor | None:
    """A tensor's values by an expression that a compiler does not find elsewhere; Inductor takes the same memory for it.

    A compiler would keep what is computed of them in the forward pass for the backward pass. That takes more memory if the tensor itself
    is kept, too: if it `is_kept` anyway, or is the result of attention. Of small tensors the compiler may.
    """
    if sizes.is_small(x) or not (is_kept or inductor.is_attention(x)):
        return x.view_as(x)
    if inductor.generates(x.device):
        inductor.learn_to_hold(torch.ops.qsim.again)
        return None
    return x.view(_BITS[x.dtype.itemsize]).bitwise_or(0).view(x.dtype)
