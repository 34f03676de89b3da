"""Inductor, torch's default compiler: whether it compiles a graph, and how it learns to generate the loops and the calls of operators.

torch has no public interface for an operator whose loops fuse with their neighbours, nor for code that calls an operator's implementation
itself: through the dispatcher a call takes longer than a small kernel. This file and `meanings.inductor` use private ones in its
place. Devices and releases of torch that they have not been tested with get plain torch operators, which
have the same bits and take longer to compile.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import getitem
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor

from qsim_kernels import private

#: Releases of torch that pass `tests/kernels/test_lowered.py` with loops, by the devices where they do.
TESTED = {"cpu": ("2.11.", "2.13.", "2.15."), "cuda": ("2.11.",)}


def mark_caches() -> None:
    """Let torch's caches on disk tell code that was generated from these sources from code of another version of qsim."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    torch.compiler.config.cache_key_tag = f"{torch.compiler.config.cache_key_tag} qsim {digest}".strip()


def generates(device: torch.device) -> bool:
    """Whether Inductor compiles the graph that is being traced, for a device and in a release of torch that the loops were tested with."""
    return compiles() and is_tested(device.type)


def compiles() -> bool:
    """Whether Inductor compiles the graph that is being traced."""
    if not private.has(("V", "NullHandler")):  # imports sympy
        return False
    return not isinstance(private.V.get_fake_mode(), private.NullHandler)


def records_graphs() -> bool:
    """Whether Inductor compiles the graph that is being traced, in a mode that asks for CUDA graphs."""
    return compiles() and (private.inductor_config is None or bool(private.inductor_config.triton.cudagraphs))


#: Operators whose result is the memory that they read.
_SAME_MEMORY = ("qsim.again.default", "aten.detach.default", "aten.alias.default")
#: Operators whose result has the elements of what they read, in some order.
_SAME_ELEMENTS = (
    *_SAME_MEMORY, "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.transpose.int", "aten.permute.default",
    "aten.clone.default",
)  # fmt: skip


def is_given(x: Tensor) -> bool:
    """Whether a tensor is an input of a graph that Inductor compiles, so that there is nothing before it to fuse with.

    False for devices and releases of torch that loops were not tested with.
    """
    if not generates(x.device):
        return False
    node = _source(x, _SAME_MEMORY)
    return node is not None and node.op == "placeholder"


def is_attention(x: Tensor) -> bool:
    """Whether a tensor has the elements of an attention's result, which the attention's own backward pass needs."""
    node = _source(x, _SAME_ELEMENTS)
    if node is None or node.target is not getitem or node.args[1] != 0:
        return False
    return "scaled_dot_product" in str(node.args[0].target)


def _source(x: Tensor, passed: Sequence[str]) -> Any:
    """The node of the graph that is being traced from which a tensor comes, by way of some operators; `None` if there is none."""
    mode = private.get_proxy_mode() if private.has(("get_proxy_mode", "get_proxy_slot", "from_functional_tensor")) else None
    if mode is None:
        return None
    fake = private.from_functional_tensor(x.elem) if isinstance(x, private.FunctionalTensor) else x
    found = private.get_proxy_slot(fake, mode.tracer, None)
    node: Any = None if found is None else found.proxy.node
    while node is not None and str(node.target) in passed:
        node = node.args[0]
    return node


def is_tested(*devices: str) -> bool:
    """Whether loops and calls were tested in this release of torch, which has all that they need: on one of some devices, or on any."""
    releases = tuple(release for device in devices or TESTED for release in TESTED.get(device, ()))
    return torch.version.hip is None and torch.__version__.startswith(releases) and private.has(private.LOOPS)


def writes_loops(x: object) -> bool:
    """Whether a function gets elements of a loop in place of tensors."""
    return not isinstance(x, Tensor)


@cache
def learn(operator: Any, function: Callable[..., Tensor], *, held: bool, computed_again: bool = True) -> None:
    """Let Inductor generate an operator's loops.

    Args:
        operator: The operator, with all its overloads.
        function: What it computes, from broadcast tensors; its last argument is the result's dtype.
        held: Whether the result is kept in memory.
        computed_again: Whether AOTAutograd may compute it again in the backward pass if keeping its result costs more.
    """
    _register(operator, _loops(function, held=held), computed_again=computed_again)


@cache
def learn_to_hold(operator: Any) -> None:
    """Let Inductor write an operator's first argument to memory, where whatever comes later reads it, and take it for the result."""

    def held(x: Any, *_: Any) -> Any:
        x.realize()
        return x

    _register(operator, held)


@cache
def learn_whole(operator: Any, reduction: Any) -> None:
    """Let Inductor reduce a tensor by a reduction of torch's in a single program, whose kernel can use the result, too."""

    def whole(*arguments: Any) -> Any:
        with private.inductor_config.patch(split_reductions=False):
            return private.lowerings[reduction](*arguments)

    _register(operator, whole)


@cache
def learn_calls(names: tuple[str, ...]) -> None:
    """Let the Python code that Inductor writes call the implementations of some operators directly, and write what they read once.

    Where neither this nor loops were tested, a warning says so.
    """
    if not is_tested():
        releases = ", ".join(sorted({release.rstrip(".") for tested in TESTED.values() for release in tested}))
        warnings.warn(
            f"compiled code has torch's own operators instead of qsim's loops, which takes longer to compile: these are tested with torch "
            f"{releases}, and this is {torch.__version__}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    for name in names:
        code = private.CustomCodegen(python=partial(_write_call, name))
        private.CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.qsim.{name}.default"] = code
        private.make_fallback(getattr(torch.ops.qsim, name).default, _lay_out)


def _lay_out(node: Any, *arguments: Any, **named: Any) -> Any:
    """Lay the arguments of an operator out as they are in eager code.

    What it rounds is in memory before. Otherwise Inductor would compute and write it again for each operator that reads a view of it.
    """
    for rounded in arguments[:1]:
        rounded.realize()
    return private.constrain_to_fx_strides(node, *arguments, **named)


def _write_call(name: str, node: Any, write: Callable[[Any], None]) -> None:
    """Write a line that calls an operator: directly, on devices that this was tested with."""
    wrapper, device = private.V.graph.wrapper_code, node.get_device()
    if device is not None and is_tested(device.type):
        node.python_kernel_name = f"qsim_{device.type}_{name}"
        # Other releases and checkouts load this code from Inductor's cache: it uses public names that all of them have.
        wrapper.add_import_once("from qsim_kernels.ops.backend import library as qsim_library")
        wrapper.add_import_once(f"{node.python_kernel_name} = qsim_library.implementation({name!r}, {device.type.upper()!r})")
    write(private.ExternKernelAllocLine(wrapper, node))


def _register(operator: Any, lowered: Callable[..., Any], *, computed_again: bool = True) -> None:
    if computed_again:
        private.pointwise_ops().append(operator)
    private.register_lowering(operator, type_promotion_kind=None)(lowered)


def _loops(function: Callable[..., Any], *, held: bool) -> Callable[..., Any]:
    """The function that lowers an operator to a loop, whose body the operator's own function writes."""
    from qsim_kernels.meanings.inductor import LoopElement

    def lowered(*arguments: Any) -> Any:
        given, spec = private.tree_flatten(arguments)
        places = [place for place, x in enumerate(given) if isinstance(x, private.TensorBox)]
        boxes = private.broadcast_tensors(*(given[place] for place in places))

        def body(*loaded: Any) -> Any:
            values = list(given)
            for place, box, value in zip(places, boxes, loaded, strict=True):
                values[place] = LoopElement(value, box.get_dtype(), box.get_device())
            return function(*private.tree_unflatten(values, spec)).value

        result = private.make_pointwise(body, override_return_dtype=arguments[-1])(*boxes)
        if held:
            result.realize()
        return result

    return lowered
