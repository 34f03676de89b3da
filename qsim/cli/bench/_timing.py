"""Timing of calls: a clock for each kind of device, and alternating calls, so that slowdowns of the machine affect all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[], object]

#: Rounds before the first timed one: they compile, fill caches and wake the processor up.
WARMUP = 3


class Clock:
    """The clock of the CPU, where a call that has returned has finished its work: it records moments, and the time between two of them."""

    def mark(self) -> Any:
        """The moment when all work queued so far is done."""
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has finished all its work."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks; call `wait` first."""
        return float(end - begin)


class EventClock(Clock):
    """The clock of CUDA: events in the stream. While the device has queued work, they do not measure the host's time for launches."""

    def mark(self) -> torch.cuda.Event:
        """An event after all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the queue is empty."""
        torch.cuda.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two events."""
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock for a device's work."""
    return EventClock() if device.type == "cuda" else Clock()


def duration(call: Call, clock: Clock) -> float:
    """The time of a call, in seconds, until the device has done its work."""
    begin = time.perf_counter()
    call()
    clock.wait()
    return time.perf_counter() - begin


def interleaved(calls: Sequence[Call], clock: Clock, repeats: int) -> list[float]:
    """Time alternating calls.

    Args:
        calls: The calls to time.
        clock: The clock of their device.
        repeats: The number of turns of each.

    Returns:
        The median time of each call, in seconds.
    """
    _warm_up(calls)
    clock.wait()
    spans = [[_span(call, clock) for call in calls] for _ in range(repeats)]
    clock.wait()
    return _medians([clock.seconds(*span) for span in turn] for turn in spans)


def excess(call: Call, more: Call, clock: Clock, repeats: int) -> tuple[float, float]:
    """Time how much longer one call takes than another just before it, so that temporary slowness of the host does not matter.

    Args:
        call: The baseline.
        more: The baseline plus the work to be timed.
        clock: The clock of their device.
        repeats: The number of turns of each.

    Returns:
        The median time of the first call and the median of the differences, in seconds.
    """
    _warm_up([call, more])
    times = []
    for _ in range(repeats):
        spans = [_span(turn, clock) for turn in (call, more)]
        clock.wait()
        short, long = (clock.seconds(*span) for span in spans)
        times.append([short, long - short])
    short, difference = _medians(times)
    return short, difference


def sustained(calls: Sequence[Call], clock: Clock, seconds: float, rounds: int = 3) -> list[float]:
    """Time calls in long turns, like the steps of a training run: a GPU that reaches its power limit slows down.

    Args:
        calls: The calls to time.
        clock: The clock of their device.
        seconds: The duration of each turn.
        rounds: The number of turns of each.

    Returns:
        The median time of each call over its turns, in seconds.
    """
    counts = [max(1, round(seconds / time)) for time in interleaved(calls, clock, 3)]

    def turn(call: Call, count: int) -> float:
        span = _span(lambda: _repeat(call, count), clock)
        clock.wait()
        return clock.seconds(*span) / count

    return _medians([turn(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(rounds))


def host_time(calls: Sequence[Call], clock: Clock, repeats: int, batch: int, now: Callable[[], float] = time.perf_counter) -> list[float]:
    """Time how long the host is busy with calls that alternate in batches; within a batch, it does not wait for the device.

    Args:
        calls: The calls to time.
        clock: The clock of the device, to let it finish between two batches.
        repeats: The number of batches of each.
        batch: Calls per batch, few enough not to fill the device's queue.
        now: The host's own clock.

    Returns:
        The median time of one call, in seconds.
    """
    _warm_up(calls)

    def turn(call: Call) -> float:
        clock.wait()
        begin = now()
        _repeat(call, batch)
        return (now() - begin) / batch

    found = [[turn(call) for call in calls] for _ in range(repeats)]
    clock.wait()
    return _medians(found)


def forward_and_backward(model: nn.Module, x: Tensor, upstream: Tensor, *others: Any, call: Any = None) -> Call:
    """A forward and backward pass, with all gradients recomputed.

    Args:
        model: The model.
        x: Its first input, which gets a gradient, too.
        upstream: The gradient of its result.
        *others: Its other inputs.
        call: What is called in its place, such as a compiled one.
    """
    given = x.detach().requires_grad_()

    def step() -> None:
        for leaf in (given, *model.parameters()):
            leaf.grad = None
        (model if call is None else call)(given, *others).backward(upstream)

    return step


def training_step(model: nn.Module, batch: Sequence[Tensor], loss: Any = None) -> Call:
    """A step of AdamW on a model that returns its loss; `loss` is called in its place, such as a compiled one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        (model if loss is None else loss)(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def replay(step: Call) -> Call:
    """Capture a step in a CUDA graph, which excludes Python's time.

    Args:
        step: Work on tensors that stay in place.

    Returns:
        A function that replays it.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        _repeat(step, WARMUP)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _warm_up(calls: Sequence[Call]) -> None:
    for _ in range(WARMUP):
        for call in calls:
            call()


def _repeat(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def _span(call: Call, clock: Clock) -> tuple[Any, Any]:
    """The marks before and after a call."""
    begin = clock.mark()
    call()
    return begin, clock.mark()


def _medians(turns: Iterable[Sequence[float]]) -> list[float]:
    """The median of each call's times, from those of each turn."""
    return [median(own) for own in zip(*turns, strict=True)]
