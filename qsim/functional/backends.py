"""Which implementation of the operators runs on which device, and why."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

import torch

from qsim_kernels.ops.backend import HAS_NUMBA


class Backend(NamedTuple):
    """The implementation that rounds the tensors of one kind of device.

    Attributes:
        runs: `"numba"`, `"triton"`, or `"torch"` for plain torch operators; `None` if there is no such device. All give the same bits.
        why: Reason, and what would change it.

    Example:
        >>> import qsim
        >>> runs, why = qsim.diagnostics.backends()["cpu"]
        >>> "Numba" in why
        True
    """

    runs: str | None
    why: str


def backends() -> dict[str, Backend]:
    """Which implementation runs for which device, and why. It imports the packages in question.

    Returns:
        By the name of the device: `"cpu"`, `"cuda"`, `"xpu"`, and `"others"` for all other devices.

    Example:
        >>> import qsim
        >>> qsim.diagnostics.backends()["cpu"].runs in ("numba", "torch")
        True
        >>> qsim.diagnostics.backends()["others"]
        Backend(runs='torch', why='plain torch operators run on every device')
    """
    return {"cpu": _cpu(), "cuda": _cuda(), "xpu": _xpu(), "others": Backend("torch", "plain torch operators run on every device")}


def _cpu() -> Backend:
    if not HAS_NUMBA:
        return Backend("torch", "Numba is not installed; it rounds several times faster: pip install 'qsim-torch[cpu]'")
    loops = _imported("qsim_kernels.numba")
    if isinstance(loops, ImportError):
        return Backend("torch", f"Numba is installed, but cannot be used: {loops}")
    return Backend("numba", f"Numba {version('numba')} is installed; float64 tensors run in plain torch")


def _cuda() -> Backend:
    if torch.version.hip is not None:
        return Backend("torch", "this is torch for AMD's GPUs, for which there are no kernels: plain torch rounds, several times slower")
    if not torch.cuda.is_available():
        return Backend(None, "there is no CUDA device here")
    triton = _imported("triton")
    if isinstance(triton, ImportError):
        return Backend("triton", f"Triton cannot be imported, and rounding a CUDA tensor raises the same error: {triton}")
    return Backend("triton", f"Triton {triton.__version__} compiles the kernels for {torch.cuda.get_device_name()}")


def _xpu() -> Backend:
    if not torch.xpu.is_available():
        return Backend(None, "there is no XPU device here")
    return Backend("torch", "there are no kernels for Intel's GPUs: plain torch rounds, several times slower")


def _imported(name: str) -> ModuleType | ImportError:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return error
