"""Timing of calls: a clock for each kind of device, and alternating calls, so that slowdowns of the machine affect all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    """Time how much longer one call takes than another just before it, so that temporary slowness of the host does not matter.

    Args:
        call: The baseline.
        more: The baseline plus the work to be timed.
        clock: The clock of their device.
        repeats: The number of turns of each.

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
