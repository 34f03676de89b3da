"""The report of a study: text, tables, figures, and the claims of the paper with measurements and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

import qsim
from qsim.studies.result import Result
from qsim.text.files import write_whole
from qsim.text.tables import Table

if TYPE_CHECKING:
    from qsim.studies.study import Study

_SMALLEST = (
    "The smallest effect is the smallest true effect that these runs would have found in four of five cases. "
    "[How each claim was judged](#how-each-claim-was-judged) lists the tests and the rules."
)
_EACH_BY_ITSELF = (
    "Each interval holds with its confidence by itself. Verdicts are not corrected for their number: of those that test a difference which "
    "does not exist, about one in twenty is wrong by chance, so rows that repeat a claim are read together."
)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, its test and its verdict.

    Attributes:
        source: The place in the paper.
        paper: The claim, as the paper states it.
        measured: The measurement.
        agrees: Whether they agree; None if the runs do not decide it.
        test: The quantity that tests the claim.
        rule: The rule from the quantity to the verdict, and its reason.
        power: The smallest effect that these runs would have found.
        expected: Why the answer was known beforehand, if it was: that of a theorem, or of a count of bytes. Sums of verdicts leave out
            claims that agree as expected, because the measurement checks the code rather than the claim.

    Example:
        >>> from qsim import studies
        >>> studies.Claim("Section 2", "the mean is exact", "0.300 instead of 0.3", agrees=True, test="the mean of a million draws").verdict
        'yes'
        >>> studies.Claim("Section 3", "it is faster", "1.0 [0.9, 1.1] times", agrees=None, power="1.2 times").verdict
        'undecided'
        >>> studies.Claim("Lemma 3", "as 1/b", "b to the -1.00", agrees=True, expected="it is proven").verdict
        'yes (expected)'
    """

    source: str
    paper: str
    measured: str
    agrees: bool | None
    test: str = field(default="", kw_only=True)
    rule: str = field(default="", kw_only=True)
    power: str = field(default="", kw_only=True)
    expected: str = field(default="", kw_only=True)

    @property
    def verdict(self) -> str:
        """Return `agrees` in words; a claim that was expected to agree and does not is news."""
        if self.agrees and self.expected:
            return "yes (expected)"
        return {True: "yes", False: "no", None: "undecided"}[self.agrees]


@dataclass(frozen=True)
class Picture:
    """A figure, and the name of its files.

    Attributes:
        name: The name of the files, without extension.
        caption: The caption.
        draw: A function that draws it, in colours of the cycle `C0`, `C1`, …: it is drawn for light and for dark pages. Several figures
            are panels, next to one another where there is room.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from qsim import studies
        >>> picture = studies.Picture("loss", "Loss against format.", draw=Figure)
        >>> picture.name, picture.caption
        ('loss', 'Loss against format.')
    """

    name: str
    caption: str
    draw: Callable[[], Figure | Sequence[Figure]]

    def panels(self) -> Sequence[Figure]:
        """Draw it, in the current style."""
        drawn = self.draw()
        return drawn if isinstance(drawn, Sequence) else [drawn]

    def files(self, count: int) -> list[str]:
        """The names of the files of its panels, without extension."""
        return [self.name] if count == 1 else [f"{self.name}-{number}" for number in range(1, count + 1)]


@dataclass(frozen=True)
class Report:
    """The report of a study: the answer, the verdicts, the figures, and then how these were obtained.

    Attributes:
        study: The study.
        parts: Paragraphs, tables and pictures, in order.
        claims: The paper's claims, and their verdicts.
        meaning: The result in one sentence.
        title: The heading; by default the study's question.
        note: What the intervals say about several verdicts together.

    Example:
        >>> from qsim import studies
        >>> claim = studies.Claim("Figure 1", "larger batches help", "+1.2 % [0.4, 2.0]", agrees=True)
        >>> report = studies.Report(studies.named("batch-size"), ["How it was measured."], [claim], "Larger batches help.")
        >>> report.verdicts[0]["agrees"]
        'yes'
    """

    study: Study[Any, Any]
    parts: Sequence[str | Table | Picture]
    claims: Sequence[Claim]
    meaning: str
    title: str = ""
    note: str = _EACH_BY_ITSELF

    @property
    def verdicts(self) -> Table:
        """The claims as a table."""
        rows = [
            [f"{number}. {claim.source}", claim.paper, claim.measured, claim.power, claim.verdict]
            for number, claim in enumerate(self.claims, 1)
        ]
        return Table.of("Verdicts", ["where", "claim", "measured here", "smallest effect", "agrees"], rows)

    @property
    def tests(self) -> Table:
        """The tests of the claims as a table; claims that are judged alike share a row."""
        alike: dict[tuple[str, str, str], list[str]] = {}
        for number, claim in enumerate(self.claims, 1):
            rule = f"{claim.rule}; expected: {claim.expected}" if claim.expected else claim.rule
            alike.setdefault((claim.source, claim.test, rule), []).append(str(number))
        rows = [[f"{', '.join(numbers)}. {source}", test, rule] for (source, test, rule), numbers in alike.items()]
        return Table.of("How each claim was judged", ["where", "quantity that tests the claim", "rule, and its reason"], rows)

    @property
    def pictures(self) -> list[Picture]:
        """The pictures, in order."""
        return [part for part in self.parts if isinstance(part, Picture)]

    def markdown(self, origin: str, panels: Mapping[str, int] | None = None) -> str:
        """The report as a Markdown page.

        Args:
            origin: Provenance of the results: command, date, machine.
            panels: The number of panels of each picture that has several, by its name.
        """
        page = [f"# {self.title or self.study.question}", f"**{self.meaning}**", f"Study `{self.study.name}`. Source: {self.study.source}."]
        page += [f"## {self.verdicts.heading}", self.verdicts.markdown(), _SMALLEST if self.claims else ""]
        page.append("## Figures" if self.pictures else "")
        for picture in self.pictures:
            names = picture.files((panels or {}).get(picture.name, 1))
            page += ["\n".join(f"![{picture.caption}]({name}.svg)" for name in names), f"*{picture.caption}*"]
        page.append("## Setting" if any(isinstance(part, str) for part in self.parts) else "")
        page += [part for part in self.parts if isinstance(part, str)]
        for part in (*self.parts, self.tests):
            if isinstance(part, Table):
                page += [f"## {part.heading}", part.markdown()]
        page += [self.note if self.claims else "", "## How it was run", origin]
        return "\n\n".join(part for part in page if part) + "\n"

    def write(self, folder: Path, origin: str) -> list[Path]:
        """Write the page and its pictures as SVG, each for light and, with the suffix `-dark`, for dark pages.

        Returns:
            The page, then the pictures for light pages.
        """
        from qsim.plot import figures

        folder.mkdir(parents=True, exist_ok=True)
        drawn: dict[str, int] = {}
        written: list[Path] = []
        for theme, suffix in (("light", ""), ("dark", "-dark")):
            with figures.style(theme):
                for picture in self.pictures:
                    panels = picture.panels()
                    drawn[picture.name] = len(panels)
                    for panel, name in zip(panels, picture.files(len(panels)), strict=True):
                        path = figures.save(panel, folder, name + suffix)
                        written += [] if suffix else [path]
        page = folder / "report.md"
        write_whole(page, self.markdown(origin, drawn))
        return [page, *written]


def provenance(command: str, results: Sequence[Result[Any]]) -> str:
    """The provenance of results as text.

    Args:
        command: The command that reproduces them, or a sentence with code in it.
        results: All results.
    """
    machines: Counter[str] = Counter()
    for result in results:
        machines[described_machine(result.machine)] += 1
    seconds = sum(result.seconds for result in results)
    lines = [command if "`" in command else f"`{command}`", ""]
    lines += [f"- {count} runs on {machine}" for machine, count in machines.most_common()]
    lines += [f"- {seconds:.0f} seconds in total over all runs", "- every result: [results.jsonl](results.jsonl)"]
    lines += [f"- {found}" for found in _outdated(results)]
    return "\n".join(lines)


def _outdated(results: Sequence[Result[Any]]) -> list[str]:
    """A sentence on runs of other versions of this package."""
    others = [result.machine["qsim"] for result in results if result.machine["qsim"] != qsim.__version__]
    if not others:
        return []
    return [f"{len(others)} runs are of qsim {', '.join(sorted(set(others)))}: {qsim.__version__} judges them, but has not repeated them"]


def listed(words: Sequence[str]) -> str:
    """Join words as a list in a sentence.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c"])
        ('a and b', 'a, b and c')
    """
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def described_machine(machine: Mapping[str, str]) -> str:
    """A machine in one line."""
    commit = f" at {machine['commit']}" if machine.get("commit") else ""
    python = f", Python {machine['python']}" if machine.get("python") else ""
    return f"{machine['device']}{python}, torch {machine['torch']}, qsim {machine['qsim']}{commit}, {machine['date']}"
