"""The study `replicas`: shared noise keeps replicas equal, independent noise does not, and every verdict from made-up results."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qsim.optim import AdamW
from qsim.studies import replicas
from qsim.studies.replicas import _LOOKS, INDEPENDENT, SHARED, ReplicasStudy, Run, Settings
from support import made_up

pytest.importorskip("sklearn")


@pytest.mark.parametrize("noise", [SHARED, INDEPENDENT])
def test_only_shared_noise_keeps_replicas_equal(noise: str) -> None:
    found = ReplicasStudy().measure(Run(noise=noise, replicas=2, rate=2.0**-9, batch=16, steps=_LOOKS, seed=0), torch.device("cpu"))
    assert len(found["apart"]) == len(found["moved"]) == _LOOKS
    assert (max(found["apart"]) == 0) == (noise == SHARED)
    assert 0 < found["apart"][-1] / found["moved"][-1] < 0.5 or noise == SHARED
    assert found["average"] == pytest.approx(found["loss"], rel=0.01)


def test_independent_replicas_of_all_seeds_have_different_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def optimizer(*given: Any, seed: int) -> AdamW:
        drawn.append(seed)
        return AdamW(*given, seed=seed)

    monkeypatch.setattr(replicas.qsim, "optim", SimpleNamespace(AdamW=optimizer))
    for seed in range(3):
        run = Run(noise=INDEPENDENT, replicas=3, rate=2.0**-9, batch=6, steps=0, seed=seed)
        ReplicasStudy().measure(run, torch.device("cpu"))
    assert len(set(drawn)) == len(drawn) == 9


# Differences per rate and replica: at the low rate, at the high rate, of the average, and the growth of distances.
@pytest.mark.parametrize(
    ("small", "large", "average", "growth", "apart", "expected"),
    [
        (0.01, 2.0, -0.1, 0.1, 0.0, [True] * 6),
        (-0.01, 0.1, 0.1, -0.1, 1e-9, [False] * 6),
        (0.0, math.log(2), 0.0, 0.0, 0.0, [True] + [None] * 5),
    ],
)
def test_verdicts(small: float, large: float, average: float, growth: float, apart: float, expected: list[bool | None]) -> None:
    settings = Settings()

    def values(run: Run) -> dict[str, Any]:
        noise = 0.003 * made_up.noise(ReplicasStudy(), run)
        more = (small * run.replicas if run.rate == settings.rates[0] else large) if run.noise == INDEPENDENT else 0.0
        loss = math.exp(more + noise)
        away = [math.exp(growth * look + noise * look) for look in range(_LOOKS)]
        return {
            "loss": loss,
            "average": loss * math.exp(average + noise),
            "apart": away if run.noise == INDEPENDENT else [apart] * _LOOKS,
            "moved": [10.0] * _LOOKS,
        }

    assert made_up.verdicts(ReplicasStudy(), settings, values) == expected


def test_settings() -> None:
    with pytest.raises(ValueError, match="replicas: must be from 2; got 1,2"):
        ReplicasStudy().runs(Settings(replicas=(1, 2)))
    with pytest.raises(ValueError, match=r"rates: must be at least two, in increasing order; got 0\.5"):
        ReplicasStudy().runs(Settings(rates=(0.5,)))
