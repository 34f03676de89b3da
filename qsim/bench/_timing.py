"""How calls are timed: a clock for each kind of device, and calls that take turns, so that whatever slows the machine slows them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Call = Callable[[], object]

#: Rounds before the first that counts: they compile, fill caches and wake the processor up.
WARMUP = 3


class Clock(Protocol):
    """Marks moments on a device and tells the time between two of them."""

    def mark(self) -> Any:
        """This moment, behind all work given to the device so far."""

    def wait(self) -> None:
        """Returns when the device has done all its work."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks; only after a `wait`."""


class WallClock:
    """For the CPU, where a call that has returned has done its work."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def wait(self) -> None:
        """There is nothing to wait for."""

    def seconds(self, begin: float, end: float) -> float:
        """The time between two marks."""
        return end - begin


class EventClock:
    """For CUDA: events in the stream. As long as the device has work queued, they do not see how long the host takes to launch more."""

    def mark(self) -> torch.cuda.Event:
        """An event behind all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Returns when the queue is empty."""
        torch.cuda.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two events."""
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock that sees a device's work."""
    return EventClock() if device.type == "cuda" else WallClock()


def interleaved(calls: Sequence[Call], clock: Clock, repeats: int) -> list[float]:
    """Time calls that take turns.

    Args:
        calls: What to time.
        clock: The clock of the device that they run on.
        repeats: How often each has its turn.

    Returns:
        The median time of each call, in seconds.
    """
    for _ in range(WARMUP):
        for call in calls:
            call()
    clock.wait()
    spans: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, own in zip(calls, spans, strict=True):
            begin = clock.mark()
            call()
            own.append((begin, clock.mark()))
    clock.wait()
    return [statistics.median(clock.seconds(*span) for span in own) for own in spans]


def excess(call: Call, more: Call, clock: Clock, repeats: int) -> tuple[float, float]:
    """Time how much longer one call takes than another just before it, which a host that is slow for a while does not hide.

    Args:
        call: What is done anyway.
        more: The same and what else is to be timed.
        clock: The clock of the device that they run on.
        repeats: How often each has its turn.

    Returns:
        The median time of the first call and the median of the differences, in seconds.
    """
    for _ in range(WARMUP):
        call()
        more()
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        marks = [clock.mark()]
        for turn in (call, more):
            turn()
            marks.append(clock.mark())
        clock.wait()
        times.append((clock.seconds(*marks[:2]), clock.seconds(*marks[1:])))
    return statistics.median(time for time, _ in times), statistics.median(longer - time for time, longer in times)


def sustained(calls: Sequence[Call], clock: Clock, seconds: float, rounds: int = 3) -> list[float]:
    """Time calls that go on for a while each, as the steps of a training run do: a GPU that runs into its limit of power slows down.

    Args:
        calls: What to time.
        clock: The clock of the device that they run on.
        seconds: How long each goes on before the next has its turn.
        rounds: How often each has its turn.

    Returns:
        The median time of each call over its turns, in seconds.
    """
    counts = [max(1, round(seconds / time)) for time in interleaved(calls, clock, 3)]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, own in zip(calls, counts, found, strict=True):
            begin = clock.mark()
            for _ in range(count):
                call()
            end = clock.mark()
            clock.wait()
            own.append(clock.seconds(begin, end) / count)
    return [statistics.median(own) for own in found]


def host_time(calls: Sequence[Call], clock: Clock, repeats: int, batch: int, now: Callable[[], float] = time.perf_counter) -> list[float]:
    """Time how long the host is busy with calls that take turns in batches; the device's work is not waited for within a batch.

    Args:
        calls: What to time.
        clock: The clock of the device, to let it finish between two batches.
        repeats: How many batches of each.
        batch: Calls in a batch. Few enough that no queue of the device fills up.
        now: The host's own clock.

    Returns:
        The median time of one call, in seconds.
    """
    for _ in range(WARMUP):
        for call in calls:
            call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, own in zip(calls, found, strict=True):
            clock.wait()
            begin = now()
            for _ in range(batch):
                call()
            own.append((now() - begin) / batch)
    clock.wait()
    return [statistics.median(own) for own in found]
