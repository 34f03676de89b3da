"""Hooks that track the running layer, installed while a step is sampled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from qsim.diagnostics.async_copy import is_capturing
from qsim.nn.product import observers
from qsim.nn.product.observers import Observer
from qsim_kernels.private import is_in_transform

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Watch:
    """Let observers watch layers while these run, and products outside of layers.

    Args:
        layers: The layers, and the modules with the names of the parameters of such products, or no name for those of two activations. No
            other watcher is allowed at the same time.
        skips_eval: Whether passes in eval mode are not watched.

    Evaluation is not watched: passes that keep nothing for a backward pass, and those while all layers are in eval mode. The first pass of
    reentrant activation checkpointing keeps nothing either; its recomputation does, and is watched instead.

    Attributes:
        called: The layers that were called since the last `begin`.

    Raises:
        ValueError: If another watcher is active.
    """

    def __init__(self, layers: Sequence[tuple[nn.Module, str | None]], skips_eval: bool = True) -> None:
        if any(layer in _watched for layer, _ in layers):
            raise ValueError("Monitor: another monitor watches the model: close that one first")
        _watched.update(layer for layer, _ in layers)
        self.called: set[nn.Module] = set()
        self._layers, self._skips_eval = layers, skips_eval
        self._handles: list[RemovableHandle] = []
        self._running: list[tuple[nn.Module, Observer | None]] = []
        self._observers: dict[tuple[nn.Module, str | None], Observer] = {}

    def begin(self, looking: Sequence[Observer]) -> None:
        """Start observation: while a layer runs, its observer is active."""
        self.called.clear()
        self._observers = dict(zip(self._layers, looking, strict=True))
        observers.watch_calls(self._of_call)
        for (layer, call), observer in self._observers.items():
            if call is not None:
                continue
            enter = _Hook(partial(self._enter, observer), layer)
            leave = _Hook(self._leave, layer)
            self._handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]

    def _enter(self, observer: Observer, layer: nn.Module) -> None:
        if self._trains():
            self.called.add(layer)
        self._running.append((layer, observers.exchange(observer if self._looks() else None)))

    def _of_call(self, module: nn.Module, name: str) -> Observer | None:
        """The observer of a product outside of layers, which may be one with the weight of a layer."""
        found = self._observers.get((module, name)) or self._observers.get((module, None))
        if found is not None and self._trains():
            self.called.add(module)
        return found if self._looks() else None

    def _leave(self, layer: nn.Module) -> None:
        # A hook before ours may have failed, so that the layer was never entered.
        if self._running and self._running[-1][0] is layer:
            observers.exchange(self._running.pop()[1])

    def _looks(self) -> bool:
        return self._trains() and not is_in_transform() and not is_capturing()

    def _trains(self) -> bool:
        """Whether a pass belongs to training: a backward pass can follow, and not all layers are in eval mode."""
        return torch.is_grad_enabled() and (not self._skips_eval or any(layer.training for layer, _ in self._layers))

    def end(self) -> None:
        """End observation."""
        observers.watch_calls(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._running:
            # The layer was interrupted in a way that calls no hooks.
            observers.exchange(self._running[0][1])
            self._running.clear()

    def close(self) -> None:
        """Release the layers for other watchers."""
        self.end()
        for layer, _ in self._layers:
            _watched.discard(layer)


class _Hook:
    """A hook of one layer that does nothing in compiled code, and that copies of the layer do not inherit."""

    def __init__(self, call: Callable[[nn.Module], None], layer: nn.Module) -> None:
        self._call, self._layer = call, layer

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._layer:
            self._call(module)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _of_a_copy, ()


def _of_a_copy() -> Callable[..., None]:
    return _nothing


def _nothing(*arguments: Any) -> None:
    """The hook that copies of a layer get: it does nothing."""
