"""The private names of torch that `qsim` uses, each with what is lost in a release that lacks it; see `qsim_kernels.private`.

No other file of `qsim` uses such a name, except those that both packages use, which are in `qsim_kernels.private`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim_kernels.private import PrivateName, refuses

_ONCE = "functions that qsim.fpu rounds once raise an error in the backward pass"
_COVERAGE = "qsim.diagnostics.coverage raises an error"
_RECOMPUTED = "what activation checkpointing computes again is recorded, counted and kept in histories again"
_TRANSFORMS = "layers under the transforms of torch.func raise torch's errors instead of qsim's"
_FUNCTION_MODES = "layers run in the mode that rounds calls outside of them, which is slower"
_BENCH = "`qsim bench recipes` raises an error"
_INNER_GRAPHS = "functions that are compiled by themselves run in Python when a converted model calls them"


def _not_a_view(x: Tensor, shape: torch.Size) -> Tensor:
    return x.clone().view(shape)


def _safe_softmax(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim).masked_fill((x == -torch.inf).all(dim, keepdim=True), 0.0)


NAMES = {
    # Autograd.
    "forward_level": PrivateName(
        "torch.autograd.forward_ad:_current_level", "derivatives in forward mode raise an error", lambda: -1, varies=True
    ),
    "backward_pass": PrivateName("torch._C:_current_graph_task_id", _RECOMPUTED, lambda: -1),
    "running_node": PrivateName("torch._C:_current_autograd_node", _RECOMPUTED, lambda: None),
    "sequence_number": PrivateName("torch._C._autograd:_get_sequence_nr", _COVERAGE, refuses(_COVERAGE)),
    "keeps_graph": PrivateName(
        "torch._C._autograd:_get_current_graph_task_keep_graph", "qsim.fpu frees what a backward pass needed later", lambda: True
    ),
    # Transforms and modes.
    "TransformType": PrivateName("torch._C._functorch:TransformType", _TRANSFORMS, SimpleNamespace(Grad=None, Vmap=None)),
    "transforms": PrivateName("torch._C._functorch:get_interpreter_stack", _TRANSFORMS, tuple),
    "function_mode": PrivateName("torch.overrides:_get_current_function_mode", _FUNCTION_MODES),
    "without_function_mode": PrivateName("torch.overrides:_pop_mode_temporarily", _FUNCTION_MODES),
    "without_function_modes": PrivateName("torch._C:DisableTorchFunction", "modes of functions see how samples are counted", nullcontext),
    "dispatch_modes": PrivateName("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _ONCE, refuses(_ONCE)),
    # Compilers.
    "is_exporting": PrivateName(
        "torch.compiler:_is_exporting_flag",
        "Dynamo breaks the graph at every layer before torch 2.13",
        torch.compiler.is_exporting,
        varies=True,
    ),
    "is_compiling_flag": PrivateName(
        "torch.compiler:_is_compiling_flag", "compilers trace every line of a layer, which takes longer to compile", varies=True
    ),
    "disable_dynamo": PrivateName("torch:_disable_dynamo", "`import qsim.optim` imports the compiler", torch.compiler.disable),
    "comptime": PrivateName("torch._dynamo.comptime:comptime", _INNER_GRAPHS),
    "translator_of": PrivateName(
        "torch._dynamo.comptime:ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator", _INNER_GRAPHS
    ),
    "compiler_counters": PrivateName("torch._dynamo.utils:counters", _BENCH, ImportError),
    "fresh_inductor_cache": PrivateName("torch._inductor.utils:fresh_inductor_cache", _BENCH, ImportError),
    # Functions and operators.
    "grouped_mm": PrivateName(
        "torch:_grouped_mm", "grouped products in bfloat16 use torch.nn.functional.grouped_mm", getattr(F, "grouped_mm", None)
    ),
    "owning_view": PrivateName("torch:ops.aten._unsafe_view.default", "results of layers are copied once more", _not_a_view),
    "safe_softmax": PrivateName("torch:ops.aten._safe_softmax.default", "attention takes one more kernel", _safe_softmax),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = NAMES[name].find()
    return globals()[name]


# What follows are attributes of torch's objects.


@contextmanager
def compiling() -> Iterator[None]:
    """Let code know that a compiler traces the operators that it calls; only where there is an `is_compiling_flag`."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled. Without the attributes, monitors and coverage take compiled models, of which they see nothing."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def storage_number(x: Tensor) -> int:
    """A number for a tensor's memory; without the attribute, its address, which all empty and all meta tensors share."""
    storage: Any = x.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def node_number(node: Any) -> int:
    """The number that autograd gave to an operation. Without it, coverage raises an error."""
    return int(getattr(node, "_sequence_nr", refuses(_COVERAGE))())


def schema_of(operator: Any) -> Any:
    """The schema of an operator. Without it, `qsim.fpu` and coverage raise an error."""
    return operator._schema


def shard_of(x: Tensor) -> Tensor | None:
    """The shard of a distributed tensor itself; `None` for others. Without it, calls on shards of parameters are not rounded."""
    return getattr(x, "_local_tensor", None)


def output_padding(module: Any, x: Tensor, output_size: list[int]) -> tuple[int, ...]:
    """The padding of a transposed convolution's result that gives it a size. Without it, an `output_size` raises an error."""
    sizes = module.stride, module.padding, module.kernel_size, module.weight.dim() - 2, module.dilation
    return tuple(module._output_padding(x, output_size, *sizes))
