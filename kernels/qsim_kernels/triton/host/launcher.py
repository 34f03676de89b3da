"""Kernels that are compiled once per form of their arguments, with fast launches from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qsim_kernels.numbers.carrier import SINGLE, GridBits
from qsim_kernels.numbers.grid import Rule
from qsim_kernels.private import current_device as _current_device, current_stream as _current_stream, launch_of
from qsim_kernels.torch.tables import kernel_table, rounding_table
from qsim_kernels.triton.placement import expect_placement

_RUNTIME = triton.knobs.runtime
_INTERPRETED = bool(_RUNTIME.interpret)


class TableAddress(NamedTuple):
    """The address of a table of a rounding among a launch's numbers, which differs between devices."""

    how: GridBits
    rule: Rule

    def on(self, device: torch.device) -> int:
        """The address in a device's memory."""
        table = kernel_table if self.how.carrier == SINGLE else rounding_table
        return table(self.how, self.rule, device).data_ptr()


class Launcher:
    """A kernel with its arguments that follow from what it computes, for tensors of any shape.

    Args:
        kernel: The kernel.
        tail: See `launcher`.
        share: See `launcher`.
        options: Compiler options.
    """

    def __init__(self, kernel: Any, tail: tuple[Any, ...], share: int, options: dict[str, int]) -> None:
        self.kernel, self.tail, self.share = kernel, tail, share
        self.options = {} if _INTERPRETED else options
        #: Whether there are addresses of tables among the last arguments.
        self.has_tables = any(isinstance(number, TableAddress) for number in tail)
        #: The compiled forms of the kernel, by the device and what they depend on of each tensor; see `Launch`.
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def compile(self, *arguments: Any) -> None:
        """Compile the kernel if necessary, without launching it, and check where Triton places elements; see `placement`."""
        expect_placement(self.kernel.warmup(*arguments, grid=(1, 1, 1), **self.options), self.kernel.fn.__name__)

    def run(self, programs: int, *arguments: Any) -> Any:
        """Launch by way of Triton, which compiles the kernel if necessary and calls the hooks of profilers."""
        return self.kernel[programs, 1, 1](*arguments, **self.options)


class Launch:
    """A prepared launch: everything that does not change between calls on tensors of the same shapes, strides and dtypes.

    Triton finds the compiled form of a kernel by inspecting every argument, which takes longer than launching it. Here the form depends on
    the device, and on the dtype and the alignment of each tensor, and the driver launches it directly. So numbers are never specialized:
    see `launcher`. Tensors other than `x` and `out`, whose strides a launch is prepared for, must be contiguous, or stored as `x` is.

    Args:
        launcher: The kernel.
        programs: Number of programs; none are launched for zero.
        sizes: The kernel's arguments that follow from the shapes, the last ones before the launcher's own.
    """

    def __init__(self, launcher: Launcher, programs: int, sizes: tuple[int, ...] = ()) -> None:
        self.launcher, self.programs = launcher, programs
        self._tail, self._compiled = (*sizes, *launcher.tail), launcher.compiled

    def tail(self, device: torch.device) -> tuple[Any, ...]:
        """The last arguments, with the addresses of tables in a device's memory."""
        if not self.launcher.has_tables:
            return self._tail
        return tuple(number.on(device) if isinstance(number, TableAddress) else number for number in self._tail)

    def __call__(self, x: Tensor, out: Tensor, *others: Any) -> None:
        """Launch the kernel on the current stream of `x`'s device.

        Args:
            x: The tensor that is read.
            out: The tensor that is written.
            *others: The arguments between these and the sizes.
        """
        if not self.programs:
            return
        source, target, device = x.data_ptr(), out.data_ptr(), x.get_device()
        tail = self.tail(x.device)
        of_others = [None if other is None else _form_of(other, x) for other in others if other.__class__ is not int]
        form = device, x.dtype, source % 16, out.dtype, target % 16, *of_others
        known = self._compiled.get(form)
        is_watched = _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls
        if _INTERPRETED:
            self.launcher.run(self.programs, x, out, *others, *tail)
        elif known is None or is_watched:
            with torch.cuda.device(device):
                if known is None:
                    self.launcher.compile(x, out, *others, *tail)
                compiled = self.launcher.run(self.programs, x, out, *others, *tail)
            self._compiled[form] = _entry(compiled)
        elif device != _current_device():
            with torch.cuda.device(device):
                self(x, out, *others)
        else:
            run, function, head = known
            run(self.programs, 1, 1, _current_stream(device), function, *head, source, target, *others, *tail)


@lru_cache(maxsize=4096)
def launcher(kernel: Any, form: tuple[Any, ...], *tail: Any, share: int = 1, **options: int) -> Launcher:
    """The launcher of a kernel, one for equal arguments.

    Args:
        kernel: The kernel.
        form: What else its compiled forms depend on.
        *tail: Its last arguments: numbers that are never specialized, then compile-time constants.
        share: Elements that a program takes.
        **options: Compiler options: `num_warps`, `maxnreg`.
    """
    return Launcher(kernel, tail, share, options)


def _form_of(argument: Tensor, x: Tensor) -> Hashable:
    """The facts of a tensor, other than `x` and `out`, on which the compiled form of a kernel depends."""
    if not argument.is_contiguous() and argument.stride() != x.stride():
        raise ValueError(f"a kernel takes tensors that are contiguous, got shape {tuple(argument.shape)} with strides {argument.stride()}")
    return argument.dtype, argument.data_ptr() % 16


def _entry(compiled: Any) -> tuple[Callable[..., None], int, tuple[Any, ...]] | None:
    """The function that launches a compiled kernel, the kernel's handle, and the arguments between this and the kernel's own."""
    launch = launch_of(compiled)
    if launch is None:
        return None
    run, function, hooks = *launch[:2], (launch[2], None, None, None)
    if triton.__version__.startswith("3.6.") and run.global_scratch_size == run.profile_scratch_size == 0:
        # Triton's Python function would only look for the memory that kernels of ours do not need.
        return run.launch, function, (run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks)
    return run, function, hooks
