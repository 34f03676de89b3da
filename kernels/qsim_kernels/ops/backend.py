"""The common base of the operators: their library, backends that are imported at the first call, schemas and the rule of vmap."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from qsim_kernels import private
from qsim_kernels.numbers.grid import Grid, GridRounding, Mode, Rule, read

if TYPE_CHECKING:
    from typing_extensions import Self

Method = TypeVar("Method", bound=Callable[..., Any])

#: Whether the compiled CPU loops are available. Checked without importing Numba.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
#: This process. OpenMP's threads, which torch may start from now on, do not survive in processes forked from it.
PROCESS = os.getpid()


def leave_to_python(function: Any, *, and_callees: bool) -> None:
    """Let Dynamo not compile a function by itself, nor what it calls then; it still traces the function into code that calls it."""
    if private.has(private.DYNAMO):
        skip, rest = private.FrameAction.SKIP, private.FrameAction.SKIP if and_callees else private.FrameAction.DEFAULT
        private.set_code_exec_strategy(function.__code__, private.FrameExecStrategy(skip, rest))


class OperatorLibrary(torch.library.Library):
    """The library of the operators, which knows the functions that implement them."""

    def __init__(self) -> None:
        super().__init__("qsim", "DEF")  # type: ignore[no-untyped-call]
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}
        #: The schemas of operators that each backend implements, by their names.
        self.on_backends: dict[str, str] = {}

    def impl(self, op_name: Any, fn: Any, dispatch_key: Any = "", **options: Any) -> Any:
        """Register the implementation of an operator for a dispatch key."""
        self._functions[op_name, dispatch_key] = fn
        # Dynamo must not compile what runs between two compiled pieces of code: numbers are addresses there, and backends are imported.
        leave_to_python(getattr(fn, "__func__", fn), and_callees=True)
        return super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]

    def implementation(self, name: str, backend: str) -> Callable[..., Any]:
        """The function that computes an operator on a backend, `"CPU"` or `"CUDA"`."""
        return self._functions.get((name, backend)) or self._functions[name, "CompositeExplicitAutograd"]


library: Any = OperatorLibrary()


def define(schema: str, fake: Callable[..., Any], *tags: torch.Tag) -> str:
    """Define an operator by its schema and its fake implementation, and return its name."""
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.register_fake(f"qsim::{name}", fake, lib=library)
    return name


def operator(
    arguments: str, fake: Callable[..., Any], *tags: torch.Tag, vmap: Callable[[str], Callable[..., Any]] | None = None
) -> Callable[[Method], Method]:
    """Make a method of an `OnBackend` the implementation of the operator with its name.

    Args:
        arguments: The rest of the operator's schema, from the arguments on; empty for that of the method's annotations.
        fake: Its fake implementation.
        *tags: Its tags.
        vmap: Returns its rule of vmap, given its name, if it has one.
    """

    def mark(method: Method) -> Method:
        schema = f"{method.__name__}{arguments}" if arguments else schema_of(method)
        method.operator = schema, fake, tags, vmap  # type: ignore[attr-defined]
        return method

    return mark


class OnBackend:
    """Operators implemented by one backend.

    Args:
        name: The backend's module, imported when an operator first runs.
        otherwise: The module to use, with a warning, if a package that the backend needs is installed but cannot be imported.
        warns_of: GPUs for which this backend takes the place of kernels, with a warning.
    """

    def __init__(self, name: str, otherwise: str | None = None, warns_of: str | None = None) -> None:
        self._name, self._otherwise, self._warns_of = name, otherwise, warns_of

    @classmethod
    def register(cls, reference: str, compiled: str, triton: str) -> None:
        """Define the operators that methods of this class implement; see `operator`. Modules are those of this package.

        Args:
            reference: The module that implements them in plain torch, for every device.
            compiled: The module for CPUs, if Numba is installed.
            triton: The module for CUDA.
        """
        backends = cls.by_dispatch_key(reference, compiled, triton)
        for name, method in vars(cls).items():
            if not hasattr(method, "operator"):
                continue
            schema, fake, tags, vmap = method.operator
            library.on_backends[define(schema, fake, *tags)] = schema
            for key, backend in backends.items():
                library.impl(name, getattr(backend, name), key)
            if vmap is not None:
                torch.library.register_vmap(f"qsim::{name}", vmap(name), lib=library)

    @classmethod
    def by_dispatch_key(cls, reference: str, compiled: str, triton: str) -> dict[str, Self]:
        """The backends by the dispatch keys of their tensors; for the arguments see `register`."""
        plain, loops, kernels = (f"qsim_kernels.{module}" for module in (reference, compiled, triton))
        backends = {"CompositeExplicitAutograd": cls(plain), "CUDA": cls(kernels)}
        if HAS_NUMBA:
            backends["CPU"] = cls(loops, otherwise=plain)
        return backends | {key: cls(plain, warns_of=gpus) for key, gpus in gpus_without_kernels().items()}

    @cached_property
    def _backend(self) -> Any:
        if self._warns_of is not None:
            _warn_of_plain_torch(self._warns_of)
        try:
            return importlib.import_module(self._name)
        except ImportError as error:
            if self._otherwise is None:
                raise
            warnings.warn(
                f"plain torch rounds CPU tensors, several times slower than Numba, because: {error}", RuntimeWarning, stacklevel=2
            )
            return importlib.import_module(self._otherwise)


def gpus_without_kernels() -> dict[str, str]:
    """The GPUs for which there are no kernels, by the dispatch keys of their tensors: AMD's have that of NVIDIA's."""
    return {"XPU": "Intel's GPUs"} | ({} if torch.version.hip is None else {"CUDA": "AMD's GPUs"})


@cache
def _warn_of_plain_torch(gpus: str) -> None:
    """Warn, once for all operators, that there are no kernels."""
    warnings.warn(
        f"plain torch rounds tensors on {gpus}, for which qsim has no kernels: the same bits, several times slower. "
        "qsim.diagnostics.backends() says what runs where",
        RuntimeWarning,
        stacklevel=4,
    )


@lru_cache(maxsize=4096)
def read_rounding(grid: str, rule: str, is_seeded: bool) -> GridRounding:
    """Parse a grid and a rule; raise an error for stochastic rounding without a seed."""
    rounding = GridRounding(read(Grid, grid), read(Rule, rule))
    if rounding.rule.mode == Mode.STOCHASTIC and not is_seeded:
        raise ValueError("stochastic rounding needs a seed")
    return rounding


#: The types of schemas by annotations, which are text.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[int]": "SymInt[]",
    "int": "SymInt",
    "str": "str",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
}


def schema_of(function: Callable[..., Any]) -> str:
    """The schema of an operator that a function or a method implements, and that has its name.

    Example:
        >>> from qsim_kernels.ops.accumulate import Implementation
        >>> schema_of(Implementation.accumulate)[:61]
        'accumulate(Tensor a, Tensor b, Tensor? seed, str how, SymInt '
    """
    signature = inspect.signature(function)
    given = [f"{_TYPES[each.annotation]} {each.name}{_default(each)}" for each in signature.parameters.values() if each.name != "self"]
    return f"{function.__name__}({', '.join(given)}) -> {_TYPES[signature.return_annotation]}"


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f"={parameter.default!r}"


def one_by_one(name: str) -> Callable[..., Any]:
    """A vmap rule: every sample gets the same results as in a call of its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        operator = getattr(torch.ops.qsim, name)
        # With no samples, run the operator on a fake one to get the shapes and dtypes of the results.
        sizes = range(info.batch_size) if info.batch_size else [None]
        results = [operator(*(_sample(a, dim, i) for a, dim in zip(arguments, in_dims, strict=True))) for i in sizes]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[: info.batch_size], 0
        return tuple(torch.stack(part)[: info.batch_size] for part in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


def _sample(argument: Any, dim: Any, index: int | None) -> Any:
    if not isinstance(argument, Tensor) or not isinstance(dim, int):
        return argument
    return argument.new_zeros(argument.movedim(dim, 0).shape[1:]) if index is None else argument.select(dim, index)
