"""Verdicts on the claims of three papers: bars of the first table of Papers to code."""

import re
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

#: Where the numbers are.
READS = ("papers.md",)
VERDICTS = {"yes": "C2", "no": "C1", "undecided": "0.6", "yes, as expected": "0.85"}


def draw() -> Figure:
    text = (Path(__file__).parents[1] / READS[0]).read_text(encoding="utf-8")
    papers = re.findall(r"^\| \[(.+)\]\(#.+\) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, flags=re.MULTILINE)
    figure, axes = plt.subplots(figsize=(4.6, 2.2))
    starts = [0] * len(papers)
    for (verdict, colour), column in zip(VERDICTS.items(), zip(*(counts for _, *counts in papers), strict=True), strict=True):
        widths = [int(count) for count in column]
        axes.barh(range(len(papers)), widths, 0.6, left=starts, color=colour, label=verdict)
        for row, (start, width) in enumerate(zip(starts, widths, strict=True)):
            if width > 2:
                axes.text(start + width / 2, row, str(width), ha="center", va="center", color="black")
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set(
        yticks=range(len(papers)),
        yticklabels=[textwrap.fill(title, 20) for title, *_ in papers],
        ylim=(len(papers) - 0.5, -0.5),
        xlabel="claims",
    )
    axes.legend(loc="lower right")
    return figure
