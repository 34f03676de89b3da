"""A caller's model, data and loss: batches of its examples, and a digest by which results are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from qsim.studies.sweeps.fingerprints import UnidentifiableError, fingerprint

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
        data_key: A name of the data by which results are stored, instead of the contents.
    """

    make_model: Callable[[], nn.Module]
    data: Any
    loss: Loss
    make_optimizer: MakeOptimizer = torch.optim.AdamW
    data_key: str | None = None

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any], Callable[[list[Any]], Any]]:
        """Data for training and testing, and the function that makes a batch of examples."""
        train, test, collate = self._datasets()
        for kind, part in (("training", train), ("test", test)):
            if isinstance(part, Sized) and len(part) == 0:
                raise ValueError(f"sweep: data must have {kind} examples, got none")
        return train, test, collate

    def _datasets(self) -> tuple[Dataset[Any], Dataset[Any], Callable[[list[Any]], Any]]:
        data = self.data() if callable(self.data) else self.data
        if isinstance(data, Sequence) and len(data) == 4 and all(isinstance(part, Tensor) for part in data):
            for kind, x, y in (("training", *data[:2]), ("test", *data[2:])):
                if len(x) != len(y):
                    raise ValueError(f"sweep: data must have one target per input, got {len(x)} {kind} inputs and {len(y)} targets")
            return TensorDataset(*data[:2]), TensorDataset(*data[2:]), default_collate
        if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, (Dataset, DataLoader)) for part in data):
            collate = next((part.collate_fn for part in data if isinstance(part, DataLoader)), default_collate)
            train, test = (part.dataset if isinstance(part, DataLoader) else part for part in data)
            return train, test, collate
        if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
            raise TypeError("sweep: data has no test examples; pass four tensors: (inputs, targets, test inputs, test targets)")
        raise TypeError(
            "sweep: data must be four tensors (inputs, targets, test inputs, test targets), or two datasets or loaders (training, test), "
            f"or a function that returns them; got {type(data).__name__}"
        )

    def first_batch(self, count: int) -> tuple[Any, Any]:
        """The first examples for training."""
        train, _, collate = self.datasets()
        if isinstance(train, TensorDataset):
            x, y = train[:count]
        else:
            x, y = collate([train[index] for index in range(min(count, len(train)))])  # type: ignore[arg-type]
        return x, y

    def described(self, rate: float) -> str:
        """The model, the data, the optimizer and the loss in words."""
        train, test, _ = self.datasets()
        with torch.random.fork_rng(devices=[]):
            model = self.make_model()
            optimizer = self.make_optimizer(model.parameters(), rate)
        size = sum(parameter.numel() for parameter in model.parameters())
        learns, tests = (f"{len(part):,}" if isinstance(part, Sized) else "an unknown number of" for part in (train, test))
        source = f" from {_named(self.data)}" if callable(self.data) else ""
        return (
            f"A {type(model).__name__} with {size:,} parameters, made by {_named(self.make_model)}, learns {learns} examples{source} "
            f"and is tested on {tests} others, by {type(optimizer).__name__}; the loss is {_named(self.loss)}"
        )

    def check_model(self) -> None:
        """Raise an error unless `make_model` makes a module with parameters of its own at every call."""
        with torch.random.fork_rng(devices=[]):
            models = [self.make_model() for _ in range(2)]
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(f"sweep: make_model must return a torch.nn.Module, got {type(model).__name__}")
        first, second = ({id(parameter) for parameter in model.parameters()} for model in models)
        if models[0] is models[1] or first & second:
            raise ValueError(
                "sweep: make_model returned parameters that it had returned before, so runs would continue each other's training; "
                "make a new model at every call"
            )

    def digest(self) -> str:
        """A digest of what the functions do and what the data contain: results of others are not used again.

        Raises:
            TypeError: If a part cannot be identified by its contents.
        """
        found = hashlib.sha256()
        for name in ("make_model", "loss", "make_optimizer"):
            found.update(_identified(getattr(self, name), name, "make it a function of plain values").encode())
        if self.data_key is not None:
            found.update(repr(self.data_key).encode())
        else:
            kind, data = ("data()", self.data()) if callable(self.data) else ("data", self.data)
            found.update(_identified(data, kind, "pass data_key=…, a name that changes with the data").encode())
        return found.hexdigest()[:16]


def _named(function: Any) -> str:
    """A function by its name, if it has one."""
    name = getattr(function, "__qualname__", "<lambda>")
    return "a function without a name" if name.endswith("<lambda>") else f"`{name}`"


def _identified(part: Any, name: str, remedy: str) -> str:
    try:
        return fingerprint(part, name)
    except UnidentifiableError as error:
        raise TypeError(f"sweep: {error}, so results of other data could be reused; {remedy}") from error
