"""Kernels that are compiled once per form of their arguments, with fast launches from then on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

_RUNTIME = triton.knobs.runtime
_INTERPRETED = bool(_RUNTIME.interpret)


def _is_watched() -> bool:
    """Whether a profiler or another tool has hooked Triton's launches."""
    hooks = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


class Launcher:
    """A kernel and all of its arguments that do not change from call to call.

    Triton finds the compiled form of a kernel by inspecting every argument, which takes longer than launching it. Here the form depends
    only on the device, pointer alignment and which optional arguments are given, and the driver launches it directly.

    Args:
        kernel: The kernel.
        numbers: Its arguments that are never specialized, the last ones before the constants.
        constants: Its compile-time constants, the elements of a block last.
        share: Elements per program.
        options: Compiler options: `num_warps`, `maxnreg`.
    """

    def __init__(self, kernel: Any, numbers: tuple[int, ...], constants: tuple[Any, ...], share: int, **options: int) -> None:
        self._kernel = kernel
        self._tail = (*numbers, *constants)
        self.share = share
        self._options = {} if _INTERPRETED else options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, x: Tensor, out: Tensor, count: int, *others: Any, absent: Hashable = None) -> None:
        """Launch as many programs as share `count` elements; the other arguments are those of `launch`."""
        self.launch(-(-count // self.share), x, out, count, *others, absent=absent)

    def launch(self, programs: int, x: Tensor, out: Tensor, *others: Any, absent: Hashable = None) -> None:
        """Launch the kernel on the current stream of `x`'s device.

        Args:
            programs: Number of programs.
            x: The tensor that is read.
            out: The tensor that is written.
            *others: The arguments between these and the numbers.
            absent: Which of the kernel's optional arguments are missing.
        """
        device = x.device.index
        if not _INTERPRETED and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(programs, x, out, *others, absent=absent)
            return
        source, target = x.data_ptr(), out.data_ptr()
        form = (device, source % 16, target % 16, absent)
        known = self._compiled.get(form)
        if known is not None and not _is_watched():
            run, function, metadata = known
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(programs, 1, 1, stream, function, metadata, None, None, None, source, target, *others, *self._tail)
            return
        compiled = self._kernel[programs, 1, 1](x, out, *others, *self._tail, **self._options)
        if not _INTERPRETED:
            self._compiled[form] = compiled.run, compiled.function, compiled.packed_metadata
