"""Kernels that are compiled once per form of their arguments, with fast launches from then on."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

_RUNTIME = triton.knobs.runtime
_INTERPRETED = bool(_RUNTIME.interpret)
# torch.cuda's functions check first that CUDA is initialized. A torch without CUDA lacks these.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


class Launcher:
    """A kernel with its arguments that follow from what it computes, for tensors of any shape.

    Triton finds the compiled form of a kernel by inspecting every argument, which takes longer than launching it. Here the form depends
    only on the device and on the alignment of two pointers, and the driver launches it directly. So whatever else it depends on must be the
    same in all launches: see `launcher`.

    Args:
        kernel: The kernel.
        tail: See `launcher`.
        share: See `launcher`.
        options: Compiler options.
    """

    def __init__(self, kernel: Any, tail: tuple[Any, ...], share: int, options: dict[str, int]) -> None:
        self._kernel, self._tail, self.share = kernel, tail, share
        self._options = {} if _INTERPRETED else options
        self._compiled: dict[tuple[int, int, int], Any] = {}

    def __call__(self, programs: int, x: Tensor, out: Tensor, *others: Any) -> None:
        """Launch the kernel on the current stream of `x`'s device.

        Args:
            programs: Number of programs; none are launched for zero.
            x: The tensor that is read.
            out: The tensor that is written.
            *others: The arguments between these and the tail.
        """
        if not programs:
            return
        source, target, device = x.data_ptr(), out.data_ptr(), x.get_device()
        known = self._compiled.get((device, source % 16, target % 16))
        is_watched = _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls
        if known is None or is_watched:
            self._compile(programs, x, out, *others)
        elif device != _current_device():
            with torch.cuda.device(device):
                self(programs, x, out, *others)
        else:
            run, function, head = known
            run(programs, 1, 1, _current_stream(device), function, *head, source, target, *others, *self._tail)

    def _compile(self, programs: int, x: Tensor, out: Tensor, *others: Any) -> None:
        """Launch by way of Triton, which compiles the kernel if necessary and calls the hooks of profilers."""
        if _INTERPRETED:
            self._kernel[programs, 1, 1](x, out, *others, *self._tail)
            return
        device = x.get_device()
        with torch.cuda.device(device):
            compiled = self._kernel[programs, 1, 1](x, out, *others, *self._tail, **self._options)
        form = device, x.data_ptr() % 16, out.data_ptr() % 16
        self._compiled[form] = _entry(compiled)


@lru_cache(maxsize=4096)
def launcher(kernel: Any, form: tuple[Any, ...], *tail: Any, share: int = 1, **options: int) -> Launcher:
    """The launcher of a kernel, one for equal arguments.

    Args:
        kernel: The kernel.
        form: What else its compiled forms depend on: the dtypes of tensors, which optional ones are given, and the alignment of others.
        *tail: Its last arguments: numbers that are never specialized, then compile-time constants.
        share: Elements that a program takes.
        **options: Compiler options: `num_warps`, `maxnreg`.
    """
    return Launcher(kernel, tail, share, options)


def _entry(compiled: Any) -> tuple[Callable[..., None], int, tuple[Any, ...]]:
    """The function that launches a compiled kernel, the kernel's handle, and the arguments between this and the kernel's own."""
    run, function, hooks = compiled.run, compiled.function, (compiled.packed_metadata, None, None, None)
    if triton.__version__.startswith("3.6.") and run.global_scratch_size == run.profile_scratch_size == 0:
        # Triton's Python function would only look for the memory that kernels of ours do not need.
        return run.launch, function, (run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks)
    return run, function, hooks


class Launch(NamedTuple):
    """A prepared launch: everything that does not change between calls on tensors of the same shapes, strides and dtypes.

    Attributes:
        launcher: The kernel.
        programs: Number of programs.
        sizes: The kernel's arguments that follow from the shapes, the last ones before the launcher's own.
    """

    launcher: Launcher
    programs: int
    sizes: tuple[int, ...]
