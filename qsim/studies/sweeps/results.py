"""The results of a sweep: losses by points, batch size and learning rate, differences from a reference, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.report import Claim, Picture, Report, listed
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, above, below, confidence_text, describe_bars, difference, mean
from qsim.studies.study import Run, Study
from qsim.text.percentages import percent
from qsim.text.tables import Table

#: What all batch sizes have in common: the number of updates, or the number of examples.
STEPS, EXAMPLES = "steps", "examples"
DESIGNS = {STEPS: "equal steps", EXAMPLES: "equal examples"}


@dataclass(frozen=True)
class Settings:
    """The grid of a sweep, and the share of the reference's loss that points may add and still count as equal."""

    labels: tuple[str, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    steps: int
    seeds: int
    tolerance: float
    designs: tuple[str, ...] = (STEPS,)

    def updates(self, design: str, batch: int) -> int:
        """The number of updates with a batch size; with equal examples, those of the middle size see as many as with equal steps."""
        middle = self.batches[len(self.batches) // 2]
        return self.steps if design == STEPS else max(1, round(self.steps * middle / batch))


class Sweep:
    """The results of `sweep`: losses, differences from the reference with intervals, verdicts and figures.

    Attributes:
        settings: The grid.
        report: The report, as written to the folder.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> result = studies.sweep(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss,
        ...     points=["mxfp8"], batches=[8], steps=2, seeds=2, folder=tempfile.mkdtemp(),
        ... )
        >>> type(result).__name__, len(result.losses("mxfp8", 8, 1e-3)), result.compared
        ('Sweep', 2, ('mxfp8',))
    """

    def __init__(self, study: Study[Any, Run], settings: Settings, results: Sequence[Result[Run]], sources: str) -> None:
        self._study, self.settings, self._results, self._sources = study, settings, results, sources
        self._of = {(r.run.label, r.run.batch, r.run.steps, r.run.rate, r.run.seed): r for r in results}
        self.reference, self._first = settings.labels[0], settings.designs[0]
        self.report = self._report()

    def __str__(self) -> str:
        """The answer, and tables of losses."""
        return "\n\n".join([self.report.meaning, *(f"{table.heading}\n{table}" for table in self._tables())])

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each run: points, batch, steps, rate, seed, test_loss, training_loss and seconds."""
        keys = ("batch", "steps", "rate", "seed")
        return [
            {"points": r.run.label, **{key: getattr(r.run, key) for key in keys}, **r.values, "seconds": r.seconds} for r in self._results
        ]

    def frame(self) -> Any:
        """The runs as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.rows())

    def losses(self, label: str, batch: int, rate: float, design: str = "") -> list[float]:
        """Test loss of each seed; without a design, in the first."""
        steps = self.settings.updates(design or self._first, batch)
        return [float(self._of[label, batch, steps, rate, seed]["test_loss"]) for seed in range(self.settings.seeds)]

    def rate(self, label: str, batch: int, design: str = "") -> float:
        """Return the learning rate with the smallest mean loss."""
        return min(self.settings.rates, key=lambda rate: mean(self.losses(label, batch, rate, design)).value)

    def best(self, label: str, batch: int, design: str = "") -> list[float]:
        """Test losses of the seeds at the best learning rate."""
        return self.losses(label, batch, self.rate(label, batch, design), design)

    def added(self, label: str, batch: int, design: str = "") -> Interval:
        """Loss that points add to the reference's at the same batch size, seed by seed, each at its best learning rate."""
        return difference(self.best(label, batch, design), self.best(self.reference, batch, design))

    @property
    def compared(self) -> tuple[str, ...]:
        """The labels other than the reference's."""
        return self.settings.labels[1:]

    def _report(self) -> Report:
        grid = self.settings
        several = len(grid.rates) > 1
        rates = f"{'the best of the learning rates' if several else 'a learning rate of'} {listed([f'{rate:g}' for rate in grid.rates])}"
        middle = grid.batches[len(grid.batches) // 2]
        examples = f"With equal examples, {grid.steps} updates are those of batches of {middle}. " if EXAMPLES in grid.designs else ""
        text = (
            f"{self._sources}. {grid.steps} updates, {grid.seeds} seeds, {rates}. {examples}A seed sets the initial weights and the "
            f"batches, which are the same for all points, so differences from {self.reference} are computed seed by seed. Losses are those "
            f"of the rounding model on the test data. Intervals are {confidence_text()}, over seeds."
        )
        if several:
            text += " The rate was chosen on the same seeds as are compared, which favours all points alike."
        picture = Picture("losses", f"Test loss by batch size. {describe_bars()}", self._draw)
        claims = [self._as_good(label, batch, design) for design in grid.designs for label in self.compared for batch in grid.batches]
        if len(grid.batches) > 1:
            claims += [self._closes(label, design) for design in grid.designs for label in self.compared]
        return Report(self._study, [text, picture, *self._tables(), *self._problems(), self._points()], claims, self._meaning())

    def _tables(self) -> list[Table]:
        """The losses, and what points add to that of the reference."""
        designs = self.settings.designs
        tables = [self._table("Test loss", self.settings.labels, design, self._loss) for design in designs]
        if self.compared:
            tables += [self._table(f"Added to the loss of {self.reference}", self.compared, each, self._added) for each in designs]
        return tables

    def _where(self, text: str, design: str) -> str:
        """A text, with the design if there are several."""
        return f"{text}, {DESIGNS[design]}" if len(self.settings.designs) > 1 else text

    def _loss(self, label: str, batch: int, design: str) -> str:
        return f"{mean(self.best(label, batch, design)):.4g}"

    def _added(self, label: str, batch: int, design: str) -> str:
        return f"{self.added(label, batch, design):+.4g}"

    def _table(self, title: str, labels: Sequence[str], design: str, cell: Callable[[str, int, str], str]) -> Table:
        batches = self.settings.batches
        rows = [[label, *(cell(label, batch, design) for batch in batches)] for label in labels]
        return Table.of(self._where(title, design), ["points", *(f"batch {batch}" for batch in batches)], rows)

    def _problems(self) -> list[Table]:
        """The worst problem in the last step of the first seed, where there is one: a comparison of batch sizes must know of underflow."""
        steps = {batch: self.settings.updates(self._first, batch) for batch in self.settings.batches}
        worst = [
            [label, str(batch), problem]
            for label in self.compared
            for batch in self.settings.batches
            if (problem := self._of[label, batch, steps[batch], self.rate(label, batch), 0]["problem"])
        ]
        return [Table.of("Problems in the last step of the first seed", ["points", "batch", "worst problem"], worst)] if worst else []

    def _points(self) -> Table:
        written = {result.run.label: result.run.points for result in self._results}
        return Table.of("Points", ["label", "points"], [[label, f"`{written[label]}`"] for label in self.settings.labels])

    def _as_good(self, label: str, batch: int, design: str) -> Claim:
        added, reference = self.added(label, batch, design), mean(self.best(self.reference, batch, design)).value
        bound = self.settings.tolerance * abs(reference)
        return Claim(
            self._where(f"batch {batch}", design),
            f"{label} trains as well as {self.reference}",
            f"{added:+.4g} on {reference:.4g}",
            below(added, bound),
            test=f"test loss minus that of {self.reference}, seed by seed",
            rule=f"yes if less than {self.settings.tolerance:.1%} of the reference's loss is added, no if more",
            power=f"{added.detects:.2g}",
        )

    def _closes(self, label: str, design: str) -> Claim:
        least, most = self.settings.batches[0], self.settings.batches[-1]
        pairs = [(self.best(label, batch, design), self.best(self.reference, batch, design)) for batch in (least, most)]
        closed = difference(*([a - b for a, b in zip(*pair, strict=True)] for pair in pairs))
        lost = max(self._underflow(label, batch, design) for batch in (least, most))
        doubt = f"; {percent(lost)} of the gradients at a point underflow" if lost else ""
        return Claim(
            self._where(f"batches {least} to {most}", design),
            f"a larger batch closes the gap of {label}",
            f"{closed:+.4g}{doubt}",
            None if lost else above(closed),
            test=f"what it adds to the loss at batch {least}, minus the same at batch {most}",
            rule="the sign of the interval; undecided if most gradients underflow: a larger batch of a mean loss makes them smaller",
            power=f"{closed.detects:.2g}",
        )

    def _underflow(self, label: str, batch: int, design: str) -> float:
        """The largest share of gradients that underflow at a point in the last step, of any seed, if it ruins the run."""
        steps, rate = self.settings.updates(design, batch), self.rate(label, batch, design)
        return max(float(self._of[label, batch, steps, rate, seed]["underflow"]) for seed in range(self.settings.seeds))

    def _meaning(self) -> str:
        batch = self.settings.batches[-1]
        reached = f"At batch {batch}, {self.reference} reaches a test loss of {mean(self.best(self.reference, batch)).value:.4g}"
        added = [f"{self.added(label, batch).value:+.3g}" for label in self.compared]
        parts = [f"{label} {'' if i else 'adds '}{value}" for i, (label, value) in enumerate(zip(self.compared, added, strict=True))]
        return f"{reached}; {listed(parts)}." if parts else f"{reached}."

    def _draw(self) -> list[Figure]:
        drawn, axes = figures.row(len(self.settings.designs), width=4.5, height=3.0)
        batches = self.settings.batches
        for panel, design in zip(axes, self.settings.designs, strict=True):
            for look, label in zip(cycle([figures.REFERENCE, *figures.LOOKS]), self.settings.labels, strict=False):
                figures.band(panel, batches, [mean(self.best(label, batch, design)) for batch in batches], look, label)
            figures.doubling_axis(panel, batches)
            panel.set(xlabel="examples per update", ylabel="test loss", title=self._where("", design).lstrip(", "))
        figures.legends(drawn, axes, columns=2)
        return drawn
