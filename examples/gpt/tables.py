"""Tables of runs' results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]
HEADING = f"{'method':<10}  {'lr':>8}  {'seed':>4}  {'validation loss':>15}  {'perplexity':>10}  {'tokens/s':>9}  {'peak MiB':>8}"
BEST = f"{'method':<10}  {'lr':>8}  {'seeds':>5}  {'validation loss':>15}  {'± of a seed':>11}  {'tokens/s':>9}  {'peak MiB':>8}"


def row(result: Result) -> str:
    """A run's line below `HEADING`."""
    left = f"{result['method']:<10}  {result['lr']:>8g}  {result['seed']:>4}"
    loss = f"{result['validation_loss']:>15.4f}  {result['perplexity']:>10.3f}"
    return f"{left}  {loss}  {_whole([result['tokens_per_second']]):>9}  {_whole([result['peak_mib']]):>8}"


def best(results: list[Result]) -> str:
    """The result of each method at its best learning rate: the mean over all seeds, and the standard deviation of one."""
    methods = dict.fromkeys(result["method"] for result in results)
    lines = [_line(_at_best_rate([result for result in results if result["method"] == method])) for method in methods]
    return "\n".join(("at each method's best learning rate", BEST, *lines))


def _at_best_rate(results: list[Result]) -> list[Result]:
    rates = dict.fromkeys(result["lr"] for result in results)
    candidates = [[result for result in results if result["lr"] == rate] for rate in rates]
    # A NaN mean, from runs that diverged, is never the smallest.
    return min(candidates, key=lambda runs: (_mean(runs) != _mean(runs), _mean(runs)))


def _line(runs: list[Result]) -> str:
    losses = [run["validation_loss"] for run in runs]
    spread = f"{statistics.stdev(losses):.4f}" if len(runs) > 1 else "-"
    left = f"{runs[0]['method']:<10}  {runs[0]['lr']:>8g}  {len(runs):>5}  {_mean(runs):>15.4f}  {spread:>11}"
    speed, peak = (_whole(run[name] for run in runs) for name in ("tokens_per_second", "peak_mib"))
    return f"{left}  {speed:>9}  {peak:>8}"


def _mean(runs: list[Result]) -> float:
    return statistics.fmean(run["validation_loss"] for run in runs)


def _whole(numbers: Iterable[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    return f"{statistics.fmean(known):.0f}" if known else "-"
