"""Which tensors are parameters or buffers of a model, or computed from these only, as casts and parametrized weights are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


class Origins:
    """Names of what tensors come from, by their storage, so that views have the name of their base.

    Storages are referenced weakly: their memory is freed as usual, and no other storage gets their address.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[StorageWeakRef, str] = {}
        for kind, tensors in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
            for name, tensor in tensors:
                self._set(tensor, f"the {kind} {name}")

    def name(self, x: Tensor) -> str | None:
        """The name of the parameter or buffer that a tensor was computed from; `None` if it depends on inputs."""
        storage = _storage(x)
        return None if storage is None else self._names.get(storage)

    def follow(self, operator: Any, given: Iterable[Any], result: Any) -> None:
        """Name an operator's results if all floating-point tensors that it takes have names; an index may be anything.

        A row that a lookup finds is an activation.
        """
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]
        names = [self.name(x) for x in tensors]
        is_named = bool(names) and None not in names and "embedding" not in str(operator)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and is_named:
                self._set(x, str(names[0]))
            elif isinstance(x, Tensor) and tensors and operator._schema.is_mutable:
                self._names.pop(_storage(x), None)  # type: ignore[arg-type]

    def _set(self, x: Tensor, name: str) -> None:
        storage = _storage(x)
        if storage is not None:
            self._names.setdefault(storage, name)


def _storage(x: Tensor) -> StorageWeakRef | None:
    """A tensor's storage; `None` for tensors without one, as sparse ones."""
    try:
        return StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
