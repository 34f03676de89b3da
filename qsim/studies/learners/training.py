"""Training on examples: a fixed number of steps, batches determined by the seed, on a GPU replayed from a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Steps before the capture, in which kernels are compiled and the optimizer creates its state.
_EAGER = 3


@dataclass(frozen=True)
class Examples(ABC):
    """Inputs and targets for training and for testing; a model returns logits whose second dimension is the class.

    Attributes:
        x: Training inputs.
        y: Their targets.
        test_x: Test inputs.
        test_y: Their targets.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @abstractmethod
    def net(self) -> nn.Module:
        """Return a new model, with random weights."""


@dataclass(frozen=True)
class Training:
    """The training of a net.

    Attributes:
        steps: The number of updates.
        batch: Examples per update.
        micro_batches: The number of parts over which its gradient is accumulated; each part is rounded separately.
        loss_scale: The factor by which the loss is multiplied before the backward pass, and gradients are divided after it.
    """

    steps: int
    batch: int
    micro_batches: int = 1
    loss_scale: float = 1.0


def train(
    model: nn.Module,
    examples: Examples,
    optimizer: torch.optim.Optimizer,
    how: Training,
    seed: int,
    look: Callable[[int], None] | None = None,
    every: int = 0,
) -> None:
    """Train a model in place.

    Args:
        model: A model that returns logits.
        examples: The training data.
        optimizer: The optimizer of its parameters.
        how: The training.
        seed: The seed of the batches.
        look: Called with the number of steps done whenever it is a multiple of `every`.
        every: See `look`.
    """
    order = torch.Generator().manual_seed(seed)
    chosen = torch.empty(how.batch, dtype=torch.long, device=examples.y.device)
    step = _step(model, examples, optimizer, how, chosen)
    step = _replayed(step) if chosen.is_cuda else step
    for done in range(1, how.steps + 1):
        chosen.copy_(torch.randint(len(examples.y), (how.batch,), generator=order))
        step()
        if look is not None and every and done % every == 0:
            look(done)


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """The share of test targets that a model predicts."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in _chunks(examples.test_x, examples.test_y))
    model.train()
    return right / examples.test_y.numel()


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean loss on examples, evaluated without training."""
    model.eval()
    found = sum(F.cross_entropy(model(part).float(), due).item() * (len(due) / len(y)) for part, due in _chunks(x, y))
    model.train()
    return found


def squared_gradient(model: nn.Module, examples: Examples) -> float:
    """The squared norm of the loss's gradient over all training data; without points, this is the true gradient.

    Batch normalization uses its running statistics, so that the gradient does not depend on how the data is split.
    """
    model.eval()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    total = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for x, y in _chunks(examples.x, examples.y):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        for sum_, part in zip(total, torch.autograd.grad(loss, weights), strict=True):
            sum_ += part
    model.train()
    return sum(float((sum_ / examples.y.numel()).square().sum()) for sum_ in total)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products and convolutions in float32 on GPUs in this context."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before and device.type != "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """At most 1,000 examples at a time, of at most 50,000 predictions."""
    size = max(1, min(1_000, 50_000 // y[0].numel()))
    yield from zip(x.split(size), y.split(size), strict=True)


def _step(model: nn.Module, examples: Examples, optimizer: torch.optim.Optimizer, how: Training, chosen: Tensor) -> Callable[[], None]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def step() -> None:
        optimizer.zero_grad()
        for part in chosen.chunk(how.micro_batches):
            loss = F.cross_entropy(model(examples.x[part]), examples.y[part])
            (loss * (how.loss_scale / how.micro_batches)).backward()
        if how.loss_scale != 1:
            torch._foreach_div_([weight.grad for weight in weights if weight.grad is not None], how.loss_scale)
        optimizer.step()

    return step


def _replayed(step: Callable[[], None]) -> Callable[[], None]:
    """A step that is called a few times, then captured, then replayed."""
    aside = torch.cuda.Stream()
    graph: torch.cuda.CUDAGraph | None = None
    calls = 0

    def replay() -> None:
        nonlocal graph, calls
        calls += 1
        if graph is not None:
            graph.replay()
            return
        # Before a capture, PyTorch's documentation asks for a warm-up on a side stream.
        if calls <= _EAGER:
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                step()
            torch.cuda.current_stream().wait_stream(aside)
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()

    return replay
