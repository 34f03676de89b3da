"""The report of the study `random-bits`: the bias of the rounding, and the loss that few random bits add in training."""

from __future__ import annotations

from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.findings import Findings, Values
from qsim.studies.learners.images import described, variant
from qsim.studies.random_bits import BACKWARD, BIAS, SAMPLES, UPDATE, Settings
from qsim.studies.report import Claim, Picture, listed
from qsim.studies.statistics import Interval, above, difference, mean, positive, within
from qsim.text.tables import Table

#: The bits of the paper's hardware, and the share of what the fewest bits cost up to which a loss counts as none.
_SIX, _SHARE = 6, 0.1
_WAYS = ((False, "truncated"), (True, "corrected"))


class Written(Findings[Settings]):
    """The results of a study, grouped by the place of the rounding, its format and its bits."""

    def begin(self) -> None:
        """The places that round, the fewest bits, and as many as the paper's hardware has."""
        self.places = [*((BACKWARD, name) for name in self.settings.formats), (UPDATE, self.settings.weights)]
        self.least = self.settings.bits[0]
        self.few = f"{self.least} truncated bit"
        self.six = min(self.settings.bits, key=lambda bits: abs(bits - _SIX))

    def title(self) -> str:
        """The question, and the data if they are other ones."""
        return f"{self.study.question} {variant(self.settings.data)}".rstrip()

    def parts(self) -> list[str | Table | Picture]:
        """Figures, the setting and tables."""
        words = {"samples": SAMPLES, "learner": described(self.settings.data), "weights": self.settings.weights.upper()}
        pictures = [self.picture("loss", self._draw_loss), self.picture("bias", self._draw_bias)]
        return [*pictures, self.text("setting", **words), *(self._losses(*place) for place in self.places), self._biases()]

    def bias(self, bits: int, *, correction: bool) -> Interval:
        """The mean error, in units of the gap."""
        name = self.settings.formats[0]
        return mean(self.over_seeds("bias", what=BIAS, format=name, bits=bits, correction=correction))

    def losses(self, what: str, name: str, bits: int, *, correction: bool) -> Values:
        """Test loss of each seed."""
        return self.over_seeds("loss", what=what, format=name, bits=bits, correction=correction)

    def added(self, what: str, name: str, bits: int, *, correction: bool) -> Interval:
        """Test loss that few random bits add to that with 32."""
        return difference(self.losses(what, name, bits, correction=correction), self.losses(what, name, 32, correction=False))

    def enough(self, what: str, name: str, bits: int, *, correction: bool) -> bool | None:
        """Whether a number of bits adds no loss, on the scale of what the fewest bits add; None if these add none either."""
        if not self.can_fail(what, name):
            return None
        margin = _SHARE * self.added(what, name, self.least, correction=False).value
        return within(self.added(what, name, bits, correction=correction), -margin, margin)

    def can_fail(self, what: str, name: str) -> bool:
        """Whether the fewest bits, truncated, add a loss that shows."""
        return above(self.added(what, name, self.least, correction=False)) is True

    def _losses(self, what: str, name: str) -> Table:
        def cells(bits: int, correction: bool) -> tuple[str, str]:
            loss, added = (
                positive(self.losses(what, name, bits, correction=correction)),
                self.added(what, name, bits, correction=correction),
            )
            return f"{loss:.3f}", f"{added:+.3f}"

        rows = [[str(bits), *cells(bits, False), *cells(bits, True)] for bits in self.settings.bits]
        rows.append(["32", f"{positive(self.losses(what, name, 32, correction=False)):.3f}", "-", "the same", "-"])
        return Table.of(
            f"Test loss, {_where(what, name)}", ["random bits", "truncated", "truncation adds", "corrected", "correction adds"], rows
        )

    def _biases(self) -> Table:
        rows = []
        for bits in self.settings.bits:
            truncated, corrected = (self.bias(bits, correction=correction) for correction in (False, True))
            rows.append([str(bits), f"{-(0.5 ** (bits + 1)):.3g}", f"{truncated:.3g}", f"{corrected:.1e}"])
        return Table.of("Mean error in units of the gap", ["random bits", "truncated, in theory", "truncated", "corrected"], rows)

    def _draw_bias(self) -> Figure:
        (figure,), (axes,) = figures.row(1)
        bits = self.settings.bits
        figures.bands(axes, bits, {label: [self.bias(count, correction=correction) for count in bits] for correction, label in _WAYS})
        axes.plot(bits, [-(0.5 ** (count + 1)) for count in bits], label=r"$-2^{-(r+1)}$", **figures.REFERENCE())
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_xticks(bits)
        axes.set(xlabel="random bits r", ylabel="mean error in gaps")
        figures.legend(figure, axes, columns=3)
        return figure

    def _draw_loss(self) -> list[Figure]:
        bits = self.settings.bits
        drawn, axes = figures.row(len(self.places))
        for figure, panel, (what, name) in zip(drawn, axes, self.places, strict=True):
            lines = {label: [self.added(what, name, count, correction=correction) for count in bits] for correction, label in _WAYS}
            figures.bands(panel, bits, lines, times=1.05)
            panel.axhline(0, **figures.REFERENCE())
            figures.doubling_axis(panel, bits)
            panel.set(xlabel="random bits", ylabel="test loss added to that of 32 bits", title=_where(what, name))
            figures.legend(figure, panel, columns=2)
        return drawn

    def claims(self) -> list[Claim]:
        """All claims."""
        truncated, corrected = (self.bias(self.least, correction=correction) for correction in (False, True))
        return [
            *(self._six_are_enough(*place, way) for place in self.places for way in (False, True)),
            self.claim("truncated", abs(truncated.value + 0.5 ** (self.least + 1)) < 1e-3, bias=truncated),
            self.claim("corrected", abs(corrected.value) < 1e-3, bias=corrected),
        ]

    def _six_are_enough(self, what: str, name: str, correction: bool) -> Claim:
        fewest, added = self.added(what, name, self.least, correction=False), self.added(what, name, self.six, correction=correction)
        can_fail = self.can_fail(what, name)
        scale = f", {added.detects / fewest.value:.0%} of what {self.few} adds" if can_fail else f"; {self.few} adds none that shows"
        words = {"way": dict(_WAYS)[correction], "where": _where(what, name), "scale": scale}
        return self.claim("six", self.enough(what, name, self.six, correction=correction), added=added, fewest=fewest, **words)

    def meaning(self) -> str:
        """The number of bits that are enough."""
        shows = [place for place in self.places if self.can_fail(*place)]
        unharmed = listed([_where(*place) for place in self.places if place not in shows])
        sentences = [f"For {unharmed}, even {self.few} adds no test loss that shows."] if unharmed else []
        if shows:
            needs = {place: [self._fewest(*place, correction) for correction, _ in _WAYS] for place in shows}
            truncated, corrected = (self._number(max(found, key=_none_last)) for found in zip(*needs.values(), strict=True))
            where = " in all cases tried" if len(shows) > 1 else f" for {_where(*shows[0])}"
            each = listed([f"{' or '.join(map(self._number, found))} for {_where(*place)}" for place, found in needs.items()])
            sentences = [
                self.text("enough", truncated=truncated, corrected=corrected, where=where),
                *([f"Truncated or corrected, it takes {each}."] if len(shows) > 1 else []),
                *sentences,
                f"Enough means at most a tenth of the test loss that {self.few} adds.",
            ]
        return " ".join(sentences)

    def _number(self, bits: int | None) -> str:
        return str(bits) if bits else f"more than {self.settings.bits[-1]}"

    def _fewest(self, what: str, name: str, correction: bool) -> int | None:
        """The fewest random bits that are enough; None if none that were tried are."""
        return min((bits for bits in self.settings.bits if self.enough(what, name, bits, correction=correction)), default=None)


def _none_last(bits: int | None) -> float:
    return float("inf") if bits is None else bits


def _where(what: str, name: str) -> str:
    return f"backward passes in {name.upper()}" if what == BACKWARD else f"updates of {name.upper()} weights"
