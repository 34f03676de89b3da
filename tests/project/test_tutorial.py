"""The tutorial's table and its sample are those of the results that its figure shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
RESULTS = json.loads((DOCS / "figures" / "tutorial.json").read_text(encoding="utf-8"))


def held_out(method: str) -> list[float]:
    """The losses at the end, seed by seed."""
    return [run["validation"][-1] for run in RESULTS["runs"] if run["method"] == method]


def test_the_table_is_that_of_the_results() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d., ]+) \| ([\d.]+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    assert [row[0].lower() for row in rows] == ["float32", "bf16", "fp8", "fp4"]
    for name, losses, mean, differences in rows:
        found, reference = held_out(name.lower()), held_out("float32")
        assert losses == ", ".join(f"{loss:.3f}" for loss in found)
        assert mean == f"{sum(found) / len(found):.3f}"
        expected = ", ".join(f"{a - b:+.3f}" for a, b in zip(found, reference, strict=True)).replace("-", "−")
        assert differences == ("–" if name == "float32" else expected)


def test_the_facts_are_those_of_the_results() -> None:
    assert f"{RESULTS['steps']} steps" in PAGE
    assert f"{RESULTS['entropy']:.2f} nats" in PAGE


def test_the_sample_is_one_of_the_models() -> None:
    (sample,) = re.findall(r"^> (HAMLET\..*?)\n\n", PAGE, flags=re.MULTILINE | re.DOTALL)
    quoted = [line.removeprefix(">").strip() for line in sample.replace("\\\n", "\n").splitlines()]
    assert [line for line in quoted if line] == [line.strip() for line in RESULTS["samples"]["fp4"].splitlines() if line.strip()]
