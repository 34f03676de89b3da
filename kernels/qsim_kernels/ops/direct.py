"""Two ways to call the operators: through torch's dispatcher, and straight to the implementation that it would choose.

The dispatcher takes longer than small kernels run, and usually only chooses an implementation. Anything else that it does is visible: to
modes, tensor subclasses, torch.func, tracers, compilers and profilers. Where there is any of these, operators are dispatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim_kernels import private
from qsim_kernels.ops import accumulate, quantize, scaled, update  # noqa: F401 (define operators)
from qsim_kernels.ops.backend import library
from qsim_kernels.private import dispatch_keys, dispatch_keys_of_thread, is_in_function_mode, is_profiling

#: The operators that can be called directly, except those that change their arguments.
FUNCTIONAL = tuple(name for name, schema in library.on_backends.items() if "!" not in schema)


class Operators:
    """The operators as functions, named and called as in `torch.ops.qsim`.

    Args:
        find: Returns the function of an operator, given its name.
    """

    def __init__(self, find: Callable[[str], Callable[..., Any]]) -> None:
        self.__dict__ |= {name: find(name) for name in (*FUNCTIONAL, "update_")}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no operator is called {name!r} that can be called directly")


#: The operators through the dispatcher.
DISPATCHED = Operators(lambda name: getattr(torch.ops.qsim, name).default)

#: Whether anything that could observe the difference would be seen.
_SEES_ALL = private.has(private.DIRECT)
#: What eager code adds to the keys of operands: nothing that acts.
_EAGER = {"BackendSelect", "ADInplaceOrView"}
_BACKENDS = ("CPU", "CUDA")
_CLASSES = (Tensor, torch.nn.Parameter)
#: The way to call the operators by the dispatch keys of a thread, and by those of a tensor.
_of_threads: dict[int, bool] = {}
_of_tensors: dict[int, Operators] = {}


def operators(*tensors: Tensor | None) -> Operators:
    """The operators for some tensors, and for what is computed from them: direct if the difference is not observable."""
    if not _SEES_ALL or is_dynamo_compiling() or is_profiling() or is_in_function_mode():
        return DISPATCHED
    thread = dispatch_keys_of_thread().raw_repr()
    is_eager = _of_threads.get(thread)
    if is_eager is None:
        is_eager = _of_threads[thread] = _names(dispatch_keys_of_thread()) <= _EAGER
    if not is_eager:
        return DISPATCHED
    chosen = None
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _CLASSES:
            return DISPATCHED
        keys = dispatch_keys(x).raw_repr()
        ops = _of_tensors.get(keys) or _operators_like(x)
        if chosen is not None and ops is not chosen:
            return DISPATCHED
        chosen = ops
    return chosen or DISPATCHED


def operators_of_lists(*lists: Sequence[Tensor]) -> Operators:
    """The operators for lists of tensors that have the same device and dtype each: the keys of only the first are read, which is faster."""
    if not all(set(map(type, tensors)) <= {*_CLASSES} and not any(map(Tensor.is_neg, tensors)) for tensors in lists):
        return DISPATCHED
    return operators(*(tensors[0] for tensors in lists))


def _operators_like(x: Tensor) -> Operators:
    """The operators for tensors with the dispatch keys of this one."""
    keys = dispatch_keys(x)
    names, chosen = _names(keys), DISPATCHED
    for backend in _BACKENDS:
        if backend in names and names <= {backend, f"Autograd{backend}", f"Autocast{backend}", "ADInplaceOrView"}:
            chosen = _direct(backend)
    _of_tensors[keys.raw_repr()] = chosen
    return chosen


@cache
def _direct(backend: str) -> Operators:
    """The direct operators of a backend."""
    return Operators(lambda name: library.implementation(name, backend))


def _names(keys: Any) -> set[str]:
    """The names of dispatch keys, from text like `DispatchKeySet(CPU, AutogradCPU)`."""
    return set(str(keys).partition("(")[2].rstrip(")").split(", "))
