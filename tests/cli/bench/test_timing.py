"""Tests of the parts of `qsim bench`: timing statistics, tables and command-line arguments."""

from collections.abc import Callable

import pytest

from qsim.cli.bench._measured import speeds
from qsim.cli.bench._options import count, count_text, dtypes, seconds
from qsim.cli.bench._timing import WARMUP, excess, host_time, interleaved, sustained
from qsim.text.tables import Quantity, Table


class FakeClock:
    """A clock that calls advance; a device whose marks can only be read after a wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = True

    def call(self, *durations: float) -> Callable[[], None]:
        """A call that takes the given times in turn, then the last one forever."""
        times = iter(durations)

        def run() -> None:
            self.now += next(times, durations[-1])
            self.waited = False

        return run

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        self.waited = True

    def seconds(self, begin: float, end: float) -> float:
        assert self.waited
        return end - begin


def test_interleaved_gives_the_median_of_each_call_without_the_warmup() -> None:
    clock = FakeClock()
    slow_start = clock.call(*[100.0] * WARMUP, 1.0, 9.0, 2.0)
    assert interleaved([slow_start, clock.call(5.0)], clock, 3) == [2.0, 5.0]


def test_interleaved_calls_take_turns() -> None:
    turns: list[str] = []
    interleaved([lambda: turns.append("a"), lambda: turns.append("b")], FakeClock(), 4)
    assert turns == ["a", "b"] * (WARMUP + 4)


def test_excess_is_the_median_of_differences_to_the_call_just_before() -> None:
    # A slow phase affects both calls of a turn: the medians of either, 4 and 5, would hide half of the difference.
    clock = FakeClock()
    alone, with_more = clock.call(*[100.0] * WARMUP, 1.0, 9.0, 4.0), clock.call(*[300.0] * WARMUP, 3.0, 11.0, 5.0)
    assert excess(alone, with_more, clock, 3) == (4.0, 2.0)


def test_host_time_is_that_of_one_call_and_the_device_is_not_waited_for() -> None:
    clock = FakeClock()
    host = FakeClock()
    waits: list[float] = []
    clock.wait = lambda: waits.append(host.now)  # type: ignore[method-assign]
    calls = [host.call(3.0), host.call(0.5)]
    assert host_time(calls, clock, repeats=3, batch=10, now=host.mark) == [3.0, 0.5]
    # One wait before each batch and one after the last, none within a batch.
    begin = WARMUP * 3.5
    assert waits == [begin + x for x in (0, 30, 35, 65, 70, 100, 105)]


def test_sustained_calls_go_on_for_a_while_before_the_next_has_its_turn() -> None:
    clock = FakeClock()
    turns: list[str] = []

    def timed(name: str, duration: float) -> Callable[[], None]:
        run = clock.call(duration)

        def call() -> None:
            turns.append(name)
            run()

        return call

    assert sustained([timed("a", 2.0), timed("b", 0.5), timed("c", 9.0)], clock, seconds=4.0, rounds=2) == [2.0, 0.5, 9.0]
    # Three calls of each estimate how many fit into four seconds; slower ones are called once.
    assert turns == ["a", "b", "c"] * (WARMUP + 3) + (["a"] * 2 + ["b"] * 8 + ["c"]) * 2


def test_sustained_gives_the_median_of_each_calls_turns() -> None:
    clock = FakeClock()
    found = clock.call(*[1.0] * (WARMUP + 3), 1.0, 1.0, 9.0, 7.0, 2.0, 4.0)
    # Two calls per turn: means of 1, 8 and 3 seconds.
    assert sustained([found], clock, seconds=2.0) == [3.0]


def test_bandwidths_are_bytes_by_time_and_their_ratio_is_one_for_a_copy() -> None:
    found = speeds(3 * 10**9, 1.5, 2 * 10**9, 0.5)
    assert found == {"bytes": 3 * 10**9, "seconds": 1.5, "gb_per_s": 2.0, "copy_gb_per_s": 4.0, "ratio": 0.5}
    assert speeds(100, 0.25, 100, 0.25)["ratio"] == 1.0


def test_tables_have_a_fixed_width_and_notes_in_place_of_numbers() -> None:
    columns = {"work": "work", "speed": Quantity("speed", 1), "ratio": Quantity("ratio", 1)}
    rows = [{"work": "a", "speed": 12345.67, "ratio": 1}, {"work": "much", "note": "refused"}, {"work": "b", "speed": 0, "ratio": 100}]
    lines = str(Table(tuple(rows), columns)).splitlines()
    assert lines == [
        "work    speed  ratio",
        "a     12345.7    1.0",
        "much  refused",
        "b         0.0  100.0",
    ]


def test_times_that_nothing_can_last_are_refused() -> None:
    assert seconds("0.25", "--seconds") == 0.25
    for text in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(ValueError, match=f"--seconds: {text} is not a duration: write 0.3"):
            seconds(text, "--seconds")


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("4096", 4096), ("2^22", 2**22), ("2**10", 1024), ("10^3", 1000)])
def test_counts(text: str, value: int) -> None:
    assert count(text, "--elements") == value
    assert count(count_text(value), "--elements") == value


def test_one_dtype_stays_what_it_is() -> None:
    assert dtypes("bf16, fp32:fp16", "--dtypes") == [("bf16", "bf16"), ("fp32", "fp16")]
