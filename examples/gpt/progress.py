"""Progress and speed of a run, reported without making the device wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm

from gpt.world import World

FIRST_STEPS = 10


class Arrivals:
    """Numbers copied from a device, read once they have arrived."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def send(self, x: Tensor) -> None:
        """Copy a number asynchronously."""
        if not x.is_cuda:
            self._under_way.append((x.clone(), None))
            return
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((host, event))

    def take(self) -> list[float]:
        """All numbers that have arrived since the last call."""
        arrived = []
        while self._under_way and (self._under_way[0][1] is None or self._under_way[0][1].query()):
            arrived.append(self._under_way.popleft()[0].item())
        return arrived


class Progress:
    """A bar on the first process, and the time that steps take.

    The first ten steps, which include compilation and allocation, are not counted, nor is time spent in `paused`.

    Attributes:
        losses: This process's losses of the steps that are done, complete once the bar is closed.
    """

    def __init__(self, world: World, title: str, first: int, steps: int, tokens: int) -> None:
        self.world, self.tokens = world, tokens
        self.uncounted = min(FIRST_STEPS, (steps - first) // 2)
        self.done, self.counted, self.seconds = 0, 0, 0.0
        self._since: float | None = None
        self.losses: list[float] = []
        self._arrivals = Arrivals()
        # No bar without a terminal.
        hidden = True if world.rank else None
        self.bar = tqdm(
            desc=title, total=steps * tokens, initial=first * tokens, unit="token", unit_scale=True, disable=hidden, leave=False
        )

    @contextmanager
    def step(self, loss: Tensor) -> Iterator[None]:
        """Record a training step, whose loss is in a tensor."""
        if self.done == self.uncounted:
            self._start()
        yield
        self.done += 1
        self.counted += self._since is not None
        self._arrivals.send(loss)
        for arrived in self._arrivals.take():
            self.losses.append(arrived)
            self.bar.set_postfix(loss=f"{arrived:.3f}", refresh=False)
            self.bar.update(self.tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for work that is not part of training."""
        counting = self._since is not None
        self._stop()
        yield
        if counting:
            self._start()

    def tell(self, line: str) -> None:
        """Print a line above the bar."""
        if self.world.rank == 0:
            self.bar.write(line)

    def close(self) -> None:
        """Stop the clock and remove the bar."""
        self._stop()
        self.losses += self._arrivals.take()
        self.bar.close()

    def tokens_per_second(self) -> float | None:
        """Tokens per second, over all processes."""
        return self.counted * self.tokens / self.seconds if self.counted else None

    def _start(self) -> None:
        self.world.wait()
        self._since = time.perf_counter()

    def _stop(self) -> None:
        self.world.wait()
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None
