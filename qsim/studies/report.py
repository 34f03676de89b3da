"""The report of a study: text, tables, figures, and the claims of the paper with measurements and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qsim.studies.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Asked(Protocol):
    """The parts of a study that its report needs: see `qsim.studies.Study`."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def question(self) -> str:
        """Its question, in one line."""

    @property
    def source(self) -> str:
        """The paper, with the section or figure."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and its verdict.

    Attributes:
        source: The place in the paper.
        paper: The claim.
        measured: The measurement.
        agrees: Whether they agree; None if the runs do not decide it.

    Example:
        >>> from qsim import studies
        >>> studies.Claim("Section 2", "the mean is exact", "0.300 instead of 0.3", agrees=True).verdict
        'yes'
        >>> studies.Claim("Section 3", "it is faster", "1.0 [0.9, 1.1] times", agrees=None).verdict
        'undecided'
    """

    source: str
    paper: str
    measured: str
    agrees: bool | None

    @property
    def verdict(self) -> str:
        """`agrees` as a word."""
        return {True: "yes", False: "no", None: "undecided"}[self.agrees]


@dataclass(frozen=True)
class Table:
    """Numbers in rows and columns, with a heading.

    Example:
        >>> from qsim import studies
        >>> print(studies.Table("Losses", ["format", "loss"], [["e4m3", "0.31"]]).markdown())
        | format | loss |
        | --- | --- |
        | e4m3 | 0.31 |
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [list(self.header), ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Picture:
    """A figure, and the name of its files.

    Attributes:
        name: The name of the files, without extension.
        caption: The caption.
        draw: A function that draws it.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from qsim import studies
        >>> picture = studies.Picture("loss", "Loss against format.", draw=Figure)
        >>> picture.name, picture.caption
        ('loss', 'Loss against format.')
    """

    name: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Report:
    """The report of a study.

    Attributes:
        study: The study.
        parts: Paragraphs, tables and pictures, in order.
        claims: The paper's claims, and their verdicts.
        meaning: The result in one sentence.

    Example:
        >>> from qsim import studies
        >>> claim = studies.Claim("Figure 1", "larger batches help", "+1.2 % [0.4, 2.0]", agrees=True)
        >>> report = studies.Report(studies.named("batch-size"), ["How it was measured."], [claim], "Larger batches help.")
        >>> report.verdicts.rows[0][-1]
        'yes'
    """

    study: Asked
    parts: Sequence[str | Table | Picture]
    claims: Sequence[Claim]
    meaning: str

    @property
    def verdicts(self) -> Table:
        """The claims as a table."""
        rows = [[claim.source, claim.paper, claim.measured, claim.verdict] for claim in self.claims]
        return Table("Claims of the paper", ["where", "claim", "measured here", "agrees"], rows)

    def markdown(self, origin: str) -> str:
        """The report as a Markdown page.

        Args:
            origin: Provenance of the results: command, date, machine.
        """
        page = [f"# {self.study.name}", self.study.question, f"Source: {self.study.source}", f"**{self.meaning}**"]
        for part in self.parts:
            if isinstance(part, str):
                page.append(part)
            elif isinstance(part, Table):
                page += [f"## {part.title}", part.markdown()]
            else:
                page.append(f"![{part.caption}]({part.name}.svg)\n\n*{part.caption}*")
        page += ["## How it was run", origin, f"## {self.verdicts.title}", self.verdicts.markdown()]
        return "\n\n".join(page) + "\n"

    def write(self, folder: Path, origin: str) -> list[Path]:
        """Write the page and its pictures, each as PNG and SVG.

        Returns:
            The page, then the pictures' PNG files.
        """
        from qsim import figures

        folder.mkdir(parents=True, exist_ok=True)
        pictures = [part for part in self.parts if isinstance(part, Picture)]
        with figures.style():
            for picture in pictures:
                figures.save(picture.draw(), folder, picture.name)
        page = folder / "report.md"
        page.write_text(self.markdown(origin))
        return [page, *(folder / f"{picture.name}.png" for picture in pictures)]


def origin(command: str, results: Sequence[Result[Any]]) -> str:
    """The provenance of results as text.

    Args:
        command: The command that reproduces them.
        results: All results.
    """
    machines: Counter[str] = Counter()
    for result in results:
        machines[described(result.machine)] += 1
    seconds = sum(result.seconds for result in results)
    lines = [f"`{command}`", ""]
    lines += [f"- {count} runs on {machine}" for machine, count in machines.most_common()]
    return "\n".join([*lines, f"- {seconds:.0f} seconds in total over all runs"])


def described(machine: Mapping[str, str]) -> str:
    """A machine in one line."""
    return f"{machine['device']}, torch {machine['torch']}, qsim {machine['qsim']}, {machine['date']}"
