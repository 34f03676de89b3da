"""`qsim.fpu`: arithmetic in which every operator's output is rounded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qsim import rounding as _rounding
from qsim.formats import Format
from qsim.functional.fpu.calls import WholeFunctionMode
from qsim.functional.fpu.mode import RoundingMode
from qsim.functional.fpu.names import kept_functions
from qsim.functional.fpu.output import Output, SeedSource
from qsim.random import seeds
from qsim.random.noise import Noise
from qsim.rounding import NEAREST, Overflow, Rounding
from qsim.scaling import block_formats
from qsim.scaling.block_formats import Block

_Stored = TypeVar("_Stored", Tensor, nn.Module)


class fpu(ContextDecorator):  # noqa: N801 (a context, spelt as torch.no_grad and torch.autocast are)
    """A context in which every floating-point operator's output is rounded to a format, forward and backward.

    It emulates a floating-point unit that has no other format, as in the 16-bit-FPU training of *Revisiting BFloat16 Training*, for
    unmodified code. Operators compute in the dtype of their inputs, float32, and their outputs are rounded: results, gradients and their
    sums, in-place writes, and the states and weights that an optimizer writes.

    - **Inputs are not rounded.** First convert values that no operator has rounded yet, mainly parameters and data, to the format:
      `qsim.fpu(...).store(model)`. Weights that stay in float32 are a separate experiment.
    - **Not rounded**: views, copies, comparisons, integers, `item()`, `torch.tensor(…)`, zeros; counters that are incremented in place,
      such as an optimizer's step; communication between processes; qsim's own operators, which have their own roundings. A layer with
      points rounds its result and its gradients again, as one operator.
    - **Rounded once**, like fused operators: each operator of torch, and also losses, normalizations, activations, attention and
      dropout if torch decomposes them. Statistics that they save for the backward pass stay as wide as they are computed.
      Recurrent layers such as `torch.nn.LSTM` are rounded as torch computes them, once if it fuses them; each tensor of a
      `torch._foreach_…` is one operator, and so is a fused optimizer's step.
    - **The backward pass** is rounded if it is called in the context. Gradients of gradients are rounded operator by operator.
    - **Nested contexts**: the innermost one applies. `qsim.fpu(None)` is full precision.
    - **16-bit tensors** have been rounded by torch. If their dtype is the format and the rounding is torch's, they stay unchanged;
      otherwise they raise an error. float64 is rounded like float32.
    - **Optimizers** are torch's: those of `qsim.optim` have their own roundings, and need `format=` and `state=` in the unit's format.
    - **Constants written for float32** may be out of range: `torch.finfo(torch.float32).min` is -inf in bfloat16.
    - **torch.compile** has no effect: compiled functions run operator by operator here.

    Args:
        format: A name, a torch dtype or a `Format`; `None` for full precision.
        rounding: A name or a `Rounding`.
        keep: Functions that stay in full precision, forward and backward: names (`"softmax"`, `"layer_norm"`) or torch's functions. A name
            means all forms of a function: `add` is also `+`, `+=` and `torch.Tensor.add_`.
        overflow: `"format"`: infinities beyond the largest value, like torch's own dtypes, where the format has them, and saturation
            elsewhere; or another mode of `qsim.rounding.Overflow`.
        generator: The source of each operator's seed; by default torch's own, so that `torch.manual_seed` makes a run
            reproducible and activation checkpointing repeats its noise. In a distributed run each rank then has its own noise. Optimizer
            steps of replicas must round identically: give all ranks generators in the same state for them.
        seed: A seed instead of a generator, or a `qsim.random.Noise` with a seed and a stream. The first operator uses this stream, the
            following ones use others.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a format has scales or no sign, or torch has no function with a name in `keep`. In the context: if an operator
            returns a dtype that cannot be rounded to the format, or sparse tensors.

    Example:
        >>> import torch, qsim
        >>> unit = qsim.fpu("bf16")
        >>> x, w = unit.store(torch.tensor([1.0, 0.3])), unit.store(torch.tensor([0.1, 0.7])).requires_grad_()
        >>> with unit:
        ...     loss = (x * w).sum().square()
        ...     loss.backward()
        >>> loss.item(), w.grad.tolist()
        (0.0966796875, [0.62109375, 0.1865234375])
    """

    def __init__(
        self,
        format: str | torch.dtype | Format | None,
        rounding: str | Rounding = NEAREST,
        keep: Iterable[str | Callable[..., Any]] | str | Callable[..., Any] = (),
        *,
        overflow: Overflow = "format",
        generator: torch.Generator | None = None,
        seed: int | Tensor | Noise | None = None,
    ) -> None:
        how = _rounding.resolve(rounding)
        _rounding.check_overflow(overflow)
        noise = seed if isinstance(seed, Noise) else Noise(seed)
        seeds.check_index(noise.stream, noise.offset)
        if noise.offset:
            raise ValueError(f"fpu: an operator's first element has the index 0, got an offset of {noise.offset}")
        if noise.seed is not None or generator is not None:
            source = noise.seed if isinstance(noise.seed, Tensor) else generator
            seeds.check_source(noise.seed, generator, getattr(source, "device", torch.device("cpu")))
        names = kept_functions(keep)
        self._output = None
        if format is not None:
            found = _resolved(format)
            self._output = Output(found, how, _rounding.overflow_in(found, overflow), SeedSource(noise.seed, noise.stream, generator))
        self._mode = RoundingMode(self._output)
        self._calls = WholeFunctionMode(self._mode, names)
        self._keep = names

    def __enter__(self) -> fpu:
        """Start rounding, in this thread and in the threads of its backward passes."""
        if torch.compiler.is_compiling():
            raise RuntimeError("fpu: compiled code cannot round every operator; enter the context outside of torch.compile")
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop rounding."""
        self._mode.__exit__(*exception)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*exception)  # type: ignore[no-untyped-call]

    def store(self, x: _Stored) -> _Stored:
        """Round a tensor, or a module's parameters and buffers, to the unit's format in place, with round-to-nearest.

        Args:
            x: A tensor or a module.

        Returns:
            The same object.

        Example:
            >>> import torch, qsim
            >>> qsim.fpu("bf16").store(torch.tensor([0.1, 0.999]))
            tensor([0.1001, 1.0000])
        """
        tensors = [*x.parameters(), *x.buffers()] if isinstance(x, nn.Module) else [x]
        if not all(isinstance(t, Tensor) for t in tensors):
            raise TypeError(f"fpu: store takes a tensor or a module, got {type(x).__name__}")
        if self._output is None:
            return x
        nearest = Output(self._output.format, NEAREST, self._output.overflow, SeedSource())
        with fpu(None), torch.no_grad():
            for t in tensors:
                if not nearest.leaves(t):
                    t.copy_(nearest.of(t))
        return x

    def __call__(self, function: Any) -> Any:
        """Decorate a function to round its operators: `@qsim.fpu("bf16")`."""
        if isinstance(function, (Tensor, nn.Module)):
            raise TypeError(
                f"fpu: this decorates functions, got a {type(function).__name__}; use store(x) to convert numbers to the format"
            )
        if any(is_late(function) for is_late in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
            raise TypeError(
                f"fpu: {function!r} returns before its code runs, which would not be rounded: enter the context in the function"
            )
        return super().__call__(function)

    def __repr__(self) -> str:
        if self._output is None:
            return "fpu(None)"
        keep = f", keep={sorted(self._keep)}" if self._keep else ""
        return f"fpu({self._output.format!r}, rounding={self._output.rounding!r}{keep}, overflow={self._output.overflow!r})"


def _resolved(format: str | torch.dtype | Format) -> Format:
    found = block_formats.resolve(format)
    if isinstance(found, Block):
        raise ValueError(f"fpu: operators round element by element, so the format must not have scales, got {format!r}")
    if not found.is_signed or not found.has_zero:
        raise ValueError(f"fpu: arithmetic needs zero and negative numbers, which {found!r} lacks")
    return found
