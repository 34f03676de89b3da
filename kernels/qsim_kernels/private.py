"""The private names of torch, Triton and Numba that this package uses, each with what is lost in a release that lacks it.

Private is what has a leading underscore, or is in a module that is not documented. No other file of the package uses such a name, which
`tests/project/test_private_names.py` checks; `qsim.private` has those of `qsim`. A name is looked up when it is first used. If it is
missing, a warning says what is lost, and something else takes its place: a public way to the same, or `None` where callers ask `has`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class PrivateName(NamedTuple):
    """A private name of another package.

    Attributes:
        where: The module, a colon, and the name there; nothing after the colon means the module itself.
        lost: What is lost without it.
        instead: What takes its place. An `ImportError` is raised if this is one: nothing that needs the name works.
        varies: Whether its value changes, so that what stands for it is a function that reads it.
        is_needed: Whether anything uses it, so that a warning is due.
    """

    where: str
    lost: str
    instead: Any = None
    varies: bool = False
    is_needed: bool = True

    def find(self) -> Any:
        """The object, or what takes its place, after a warning."""
        module, _, name = self.where.partition(":")
        try:
            home = importlib.import_module(module)
            found = attrgetter(name)(home) if name else home
        except (ImportError, AttributeError):
            _missing.add(self.where)
            text = f"torch {torch.__version__} has no {self.where.replace(':', '.').rstrip('.')}: {self.lost}"
            if self.instead is ImportError:
                raise ImportError(text) from None
            if self.is_needed:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return self.instead
        return partial(getattr, home, name) if self.varies else found


#: Names that were looked up and are missing.
_missing: set[str] = set()


def refuses(what: str) -> Callable[..., Any]:
    """A function that takes the place of a missing one, where there is no other way: it raises an error."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(what)

    return refuse


def _never() -> bool:
    return False


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


_DIRECT = "operators are called through torch's dispatcher, which takes longer than a small kernel"
_GRAPHS = "compiled code calls qsim's operators instead of fusing what they compute"
_DYNAMO = "where Dynamo leaves code to Python, it may compile qsim's functions by themselves, which takes longer"
_LOOPS = "compiled code rounds by torch's own operators instead of qsim's loops, which takes longer to compile"
_PYTREE = "qsim.fpu, coverage and traces raise an error, and compiled code has torch's own operators instead of loops"
_CUDA = "a launch asks torch.cuda, which takes longer"
_HAS_CUDA = torch.backends.cuda.is_built()
_NUMBA = "plain torch rounds CPU tensors"

NAMES = {
    # Calls without the dispatcher: what could observe the difference.
    "dispatch_keys": PrivateName("torch._C:_dispatch_keys", _DIRECT),
    "dispatch_keys_of_thread": PrivateName("torch._C:_dispatch_tls_local_include_set", _DIRECT),
    "is_in_function_mode": PrivateName("torch._C:_is_torch_function_mode_enabled", _DIRECT),
    "is_profiling": PrivateName("torch.autograd.profiler:_is_profiler_enabled", _DIRECT, varies=True),
    # Transforms and modes.
    "is_in_transform": PrivateName(
        "torch._C:_are_functorch_transforms_active", "the transforms of torch.func raise errors of torch on layers with points", _never
    ),
    "without_modes": PrivateName(
        "torch.utils._python_dispatch:_disable_current_modes",
        "dispatch modes see how seeds are drawn and samples counted, and models cannot be created under FakeTensorMode",
        nullcontext,
    ),
    # What Dynamo compiles.
    "FrameAction": PrivateName("torch._C._dynamo.eval_frame:_FrameAction", _DYNAMO),
    "FrameExecStrategy": PrivateName("torch._C._dynamo.eval_frame:_FrameExecStrategy", _DYNAMO),
    "set_code_exec_strategy": PrivateName("torch._C._dynamo.eval_frame:set_code_exec_strategy", _DYNAMO),
    # Operators in graphs.
    "FakeTensor": PrivateName("torch._subclasses.fake_tensor:FakeTensor", _GRAPHS, ()),
    "FunctionalTensor": PrivateName("torch._subclasses.functional_tensor:FunctionalTensor", _GRAPHS),
    "FunctionalTensorMode": PrivateName("torch._subclasses.functional_tensor:FunctionalTensorMode", _GRAPHS),
    "get_proxy_mode": PrivateName("torch.fx.experimental.proxy_tensor:get_proxy_mode", _GRAPHS, lambda: None),
    "get_proxy_slot": PrivateName("torch.fx.experimental.proxy_tensor:get_proxy_slot", _LOOPS),
    "from_functional_tensor": PrivateName("torch:_from_functional_tensor", _LOOPS),
    "statically_known_true": PrivateName(
        "torch.fx.experimental.symbolic_shapes:statically_known_true",
        "compiled code with dynamic shapes takes sizes for unknown, and kernels for small tensors on large ones",
        lambda condition: condition is True,
    ),
    # Loops and calls in the code that Inductor generates.
    "NullHandler": PrivateName("torch._inductor.virtualized:NullHandler", _LOOPS),
    "V": PrivateName("torch._inductor.virtualized:V", _LOOPS),
    "inductor_operations": PrivateName("torch._inductor.virtualized:ops", _LOOPS),
    "inductor_config": PrivateName("torch._inductor.config:", _LOOPS),
    "TensorBox": PrivateName("torch._inductor.ir:TensorBox", _LOOPS),
    "broadcast_tensors": PrivateName("torch._inductor.lowering:broadcast_tensors", _LOOPS),
    "constrain_to_fx_strides": PrivateName("torch._inductor.lowering:constrain_to_fx_strides", _LOOPS),
    "lowerings": PrivateName("torch._inductor.lowering:lowerings", _LOOPS),
    "make_fallback": PrivateName("torch._inductor.lowering:make_fallback", _LOOPS),
    "make_pointwise": PrivateName("torch._inductor.lowering:make_pointwise", _LOOPS),
    "register_lowering": PrivateName("torch._inductor.lowering:register_lowering", _LOOPS),
    "pointwise_ops": PrivateName("torch._functorch.partitioners:pointwise_ops", _LOOPS),
    "CUSTOM_EXTERN_KERNEL_CODEGEN": PrivateName(
        "torch._inductor.codegen.custom_extern_kernel_codegen:CUSTOM_EXTERN_KERNEL_CODEGEN", _LOOPS
    ),
    "CustomCodegen": PrivateName("torch._inductor.codegen.custom_extern_kernel_codegen:CustomCodegen", _LOOPS),
    "ExternKernelAllocLine": PrivateName("torch._inductor.codegen.wrapper:ExternKernelAllocLine", _LOOPS),
    # Nested arguments.
    "register_pytree_node": PrivateName(
        "torch.utils._pytree:register_pytree_node", "the transforms of torch.func raise errors on codes under scales", lambda *_, **__: None
    ),
    "tree_flatten": PrivateName("torch.utils._pytree:tree_flatten", _PYTREE, refuses(_PYTREE)),
    "tree_leaves": PrivateName("torch.utils._pytree:tree_leaves", _PYTREE, refuses(_PYTREE)),
    "tree_map": PrivateName("torch.utils._pytree:tree_map", _PYTREE, refuses(_PYTREE)),
    "tree_unflatten": PrivateName("torch.utils._pytree:tree_unflatten", _PYTREE, refuses(_PYTREE)),
    # Devices. torch.cuda's functions check first that CUDA is initialized.
    "current_device": PrivateName("torch._C:_cuda_getDevice", _CUDA, torch.cuda.current_device, is_needed=_HAS_CUDA),
    "current_stream": PrivateName("torch._C:_cuda_getCurrentRawStream", _CUDA, _stream, is_needed=_HAS_CUDA),
    "blas_handle": PrivateName("torch._C:_cuda_getCurrentBlasHandle", _CUDA, torch.cuda.current_blas_handle, is_needed=_HAS_CUDA),
    "scaled_mm": PrivateName("torch:_scaled_mm", "FP8 products with an accumulator are emulated on GPUs that could compute them"),
    "library_file": PrivateName("torch._C:__file__", "loops over large tensors on CPUs run in threads of Python's, which start later"),
    # Machine code for CPUs.
    "cgutils": PrivateName("numba.core:cgutils", _NUMBA, ImportError),
}  # fmt: skip

#: What Inductor's loops, and its direct calls of operators, need together.
LOOPS = (*(name for name, own in NAMES.items() if own.lost == _LOOPS), "tree_flatten", "tree_unflatten")
#: What direct calls of operators need together.
DIRECT = tuple(name for name, own in NAMES.items() if own.lost == _DIRECT)
#: What the lowering of operators in graphs needs together.
GRAPHS = tuple(name for name, own in NAMES.items() if own.lost == _GRAPHS)
#: The functions that configure Dynamo.
DYNAMO = tuple(name for name, own in NAMES.items() if own.lost == _DYNAMO)
#: Options of Numba's compiler for code that allocates and raises nothing. Without `_nrt` it holds calls that only Numba provides.
NUMBA_OPTIONS = {"_nrt": False, "error_model": "numpy"}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = NAMES[name].find()
    return globals()[name]


def has(names: Iterable[str]) -> bool:
    """Whether this release of torch has some of the names."""
    for name in names:
        if name not in globals():
            __getattr__(name)
    return not any(NAMES[name].where in _missing for name in names)


def constant(function: Function) -> Function:
    """Let compilers take the results of a function for constants: it gets constants, and they trace nothing of it.

    The same as `torch.compiler.assume_constant_result`, which would import the compiler. Without this attribute Dynamo traces the function,
    and breaks the graph where it cannot.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def launch_of(compiled: Any) -> tuple[Any, int, Any] | None:
    """The function that launches a kernel that Triton has compiled, the kernel's handle, and its metadata, which that function takes.

    `None` in a release of Triton whose compiled kernels lack one of them. Then every launch goes through Triton, which takes longer than a
    small kernel.
    """
    if all(hasattr(compiled, name) for name in _LAUNCH):
        return compiled.run, compiled.function, compiled.packed_metadata
    warnings.warn(f"Triton's compiled kernels lack one of {', '.join(_LAUNCH)}: launches take longer", RuntimeWarning, stacklevel=2)
    return None


_LAUNCH = "run", "function", "packed_metadata"
