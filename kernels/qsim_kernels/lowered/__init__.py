"""The operators lowered for compilers: elementwise arithmetic on bit patterns, which fuses with the surrounding code, and chips' products.

While AOTAutograd traces a graph, an operator that needs no random bits becomes plain torch operators, or a few of `fusible`'s in a graph
that Inductor compiles. They work on integers, or on floats whose result a compiler may not change, so compiled code gives the same bits.
Products that a chip computes become calls of its library. Exported programs keep the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsim_kernels import private
from qsim_kernels.lowered import fusible, inductor, products, rounding, scaling, sizes
from qsim_kernels.ops import scaled  # noqa: F401 (defines operators)
from qsim_kernels.ops.backend import library
from qsim_kernels.ops.direct import FUNCTIONAL
from qsim_kernels.private import FakeTensor, FunctionalTensor, FunctionalTensorMode

__all__ = ["inductor", "products", "rounding", "scaling", "sizes"]


def _lower(name: str, function: Callable[..., Any]) -> None:
    """Replace an operator in graphs by the result of a function of its arguments, unless that is None."""
    operator = getattr(torch.ops.qsim, name).default

    def traced(mode: Any, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, FunctionalTensor) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        # Without a graph being traced AOTAutograd only asks for shapes, which the operator's fake implementation knows.
        if private.get_proxy_mode() is not None and not torch.compiler.is_exporting():
            if inductor.compiles():
                inductor.learn_calls(FUNCTIONAL)
            with mode:
                lowered = function(*args, **(kwargs or {}))
            if lowered is not None:
                return lowered
        return mode.__torch_dispatch__(func, types, args, kwargs)

    torch.library.register_torch_dispatch(operator, FunctionalTensorMode, traced, lib=library)


#: Whether operators see themselves being traced.
_IS_TRACED = private.has(("FakeTensor", "FunctionalTensor", "FunctionalTensorMode"))

inductor.mark_caches()
for _module, _names in (
    (fusible, ("again", "of_stream", "with_seeds")),
    (products, ("accumulate", "matmul_rescaled")),
    (rounding, ("quantize", "quantize_and_sum")),
    (scaling, ("amaxes", "scales", "scales_of_tiles", "quantize_scaled", "quantize_tiles", "quantize_both_ways", "rescaled")),
):
    for _name in _names if _IS_TRACED else ():
        _lower(_name, getattr(_module, _name))
