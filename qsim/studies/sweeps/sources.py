"""A caller's model, data and loss: batches of its examples, and a digest by which results are stored."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Sources:
    """A model, data and a loss, as functions and tensors of a caller.

    Attributes:
        make_model: A function that makes a model, with weights that depend on torch's seed only.
        data: Training and test data, or a function that returns them.
        loss: A function of a model's output and targets.
        make_optimizer: A function of parameters and a learning rate.
    """

    make_model: Callable[[], nn.Module]
    data: Any
    loss: Loss
    make_optimizer: MakeOptimizer

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any], Callable[[list[Any]], Any]]:
        """Data for training and testing, and the function that makes a batch of examples."""
        data = self.data() if callable(self.data) else self.data
        if isinstance(data, Sequence) and len(data) == 4 and all(isinstance(part, Tensor) for part in data):
            return TensorDataset(*data[:2]), TensorDataset(*data[2:]), default_collate
        if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, (Dataset, DataLoader)) for part in data):
            collate = next((part.collate_fn for part in data if isinstance(part, DataLoader)), default_collate)
            train, test = (part.dataset if isinstance(part, DataLoader) else part for part in data)
            return train, test, collate
        raise TypeError(
            "sweep: data must be four tensors (inputs, targets, test inputs, test targets), or two datasets or loaders (training, test), "
            f"or a function that returns them; got {type(data).__name__}"
        )

    def digest(self) -> str:
        """A digest of the functions' sources and of tensors: results of other ones are not used again."""
        found = hashlib.sha256()
        for part in (self.make_model, self.data, self.loss, self.make_optimizer):
            found.update(_written(part))
        return found.hexdigest()[:16]


def _written(part: Any) -> bytes:
    """The bytes that identify a function or data."""
    if isinstance(part, Tensor):
        flat = part.detach().cpu().contiguous()
        return str((flat.dtype, flat.shape)).encode() + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    if isinstance(part, Sequence) and not isinstance(part, str):
        return b"".join(map(_written, part))
    if isinstance(part, DataLoader):
        return _written(part.dataset)
    try:
        return inspect.getsource(part if callable(part) else type(part)).encode()
    except (OSError, TypeError):
        return getattr(part, "__qualname__", type(part).__qualname__).encode()


def name_of(part: Any) -> str:
    """A function by its module and name, data by its type."""
    return f"{part.__module__}.{part.__qualname__}" if hasattr(part, "__qualname__") else type(part).__name__
