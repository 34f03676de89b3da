"""`--no-missing`: a test that is skipped for a missing package or program fails, any other skip stays one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = str(Path(__file__).parents[1] / "conftest.py")


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("Skipped: could not import 'peft': No module named 'peft'", "failed"),
        ("Skipped: iverilog is not installed", "failed"),
        ("Skipped: needs numba", "failed"),
        ("Skipped: needs torch 2.12", "skipped"),
        ("Skipped: no bias", "skipped"),
    ],
)
def test_only_what_is_missing_fails(reason: str, outcome: str, request: pytest.FixtureRequest) -> None:
    conftest: Any = request.config.pluginmanager.get_plugin(CONFTEST)
    for is_given, due in ((True, outcome), (False, "skipped")):
        report: Any = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test.py", 3, reason))
        config: Any = SimpleNamespace(getoption=lambda name, is_given=is_given: is_given and name == "--no-missing")
        conftest._failed_if_missing(report, config)
        assert report.outcome == due
        assert report.longrepr == (f"--no-missing: {reason}" if due == "failed" else ("test.py", 3, reason))
