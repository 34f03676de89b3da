"""What a study found: text, tables, figures, and each claim of the paper beside what was measured."""

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
    """What a report says of its study: see `qsim.studies.Study`."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def question(self) -> str:
        """What it asks, in one line."""

    @property
    def source(self) -> str:
        """The paper, and where in it."""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and whether it came out.

    Attributes:
        source: Where the paper says so.
        paper: What it says.
        measured: What was found.
        agrees: Whether the one is the other; None where the runs do not decide it.
    """

    source: str
    paper: str
    measured: str
    agrees: bool | None

    @property
    def verdict(self) -> str:
        """`agrees` in a word."""
        return {True: "yes", False: "no", None: "undecided"}[self.agrees]


@dataclass(frozen=True)
class Table:
    """Numbers in rows and columns, under a heading."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As Markdown has it."""
        lines = [list(self.header), ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Picture:
    """A figure, under a name for its files.

    Attributes:
        name: Of the files, without their ending.
        caption: What is to be seen.
        draw: Makes it.
    """

    name: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Report:
    """The findings of a study.

    Attributes:
        study: Whose.
        parts: Paragraphs, tables and pictures, in their order.
        claims: What the paper says, and what came out.
        meaning: All of it in one sentence.
    """

    study: Asked
    parts: Sequence[str | Table | Picture]
    claims: Sequence[Claim]
    meaning: str

    @property
    def verdicts(self) -> Table:
        """The claims as a table."""
        rows = [[claim.source, claim.paper, claim.measured, claim.verdict] for claim in self.claims]
        return Table("What the paper says", ["where", "the paper says", "measured here", "agrees"], rows)

    def markdown(self, origin: str) -> str:
        """The report as a page.

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
        """Writes the page and its pictures, each as PNG and SVG.

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
    """Where results come from, in words.

    Args:
        command: What makes them again.
        results: All of them.
    """
    machines: Counter[str] = Counter()
    for result in results:
        machines[described(result.machine)] += 1
    seconds = sum(result.seconds for result in results)
    lines = [f"`{command}`", ""]
    lines += [f"- {count} runs on {machine}" for machine, count in machines.most_common()]
    return "\n".join([*lines, f"- {seconds:.0f} seconds in all, if one had run after the other"])


def described(machine: Mapping[str, str]) -> str:
    """A machine in a line."""
    return f"{machine['device']}, torch {machine['torch']}, qsim {machine['qsim']}, {machine['date']}"
