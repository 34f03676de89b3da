"""The gap between a model in training and its serving twin, by the component that causes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor

from qsim.text.records import Records, Values, plain, scientific


@dataclass(frozen=True)
class ComponentGap:
    """The gap when one component of the twin is that of the serving engine, and the rest is as in training.

    Attributes:
        component: `weights`, `inputs`, `sums`, `cache`, `router`, `dtype`, or `all` of them.
        setting: What the engine does there.
        kl: The mean of KL(serving ‖ training) over the positions, in nats. NaN if the component does nothing without the others.
        mean: The mean magnitude of log p_serving − log p_training over the tokens of the batch.
        largest: The largest of these magnitudes.
        top: The share of positions at which another token is the most probable.
        experts: The share of choices, one per token and mixture, that are another set of experts. NaN without mixtures.
        without: The KL of the twin with all components but this one.
        log_ratios: log p_serving − log p_training of each token after the first, by sequence; zero where the batch has padding.

    Example:
        >>> from qsim.diagnostics import ComponentGap
        >>> ComponentGap("cache", "e4m3", kl=0.25, mean=0.1, largest=0.4, top=0.0).experts
        nan
    """

    component: str
    setting: str
    kl: float
    mean: float
    largest: float
    top: float
    experts: float = math.nan
    without: float = math.nan
    log_ratios: Tensor | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The numbers, without those of single tokens; `None` for NaN."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self) if each.name != "log_ratios"}


@dataclass(frozen=True)
class RolloutGap(Records[ComponentGap]):
    """The gap of log-probabilities between training and serving, for each component and for all: what `RolloutTwin.gap` returns.

    Attributes:
        records: A record per component, and `all`, the last.
        tokens: The number of tokens that have a log-probability.

    Example:
        >>> from qsim.diagnostics import ComponentGap, RolloutGap
        >>> parts = ("weights", 2e-3), ("cache", 1e-4), ("all", 2.1e-3)
        >>> found = RolloutGap(tuple(ComponentGap(name, "…", kl, 0.01, 0.05, 0.0) for name, kl in parts), 7)
        >>> found.cause.component, found["all",].kl
        ('weights', 0.0021)
        >>> print(found)
        7 tokens; KL(serving ‖ training) 2.1e-03, most of it from weights
        component  setting       KL  mean |Δ|  max |Δ|  top token  experts  KL without
        weights    …        2.0e-03   1.0e-02  5.0e-02        0 %        -           -
        cache      …        1.0e-04   1.0e-02  5.0e-02        0 %        -           -
        all        …        2.1e-03   1.0e-02  5.0e-02        0 %        -           -
    """

    tokens: int = 0

    COLUMNS: ClassVar[Values] = {
        "component": "component",
        "setting": "setting",
        "KL": scientific("kl"),
        "mean |Δ|": scientific("mean"),
        "max |Δ|": scientific("largest"),
        "top token": "top",
        "experts": "experts",
        "KL without": scientific("without"),
    }
    RIGHT: ClassVar[tuple[str, ...]] = tuple(COLUMNS)[2:]
    KEY: ClassVar[tuple[str, ...]] = ("component",)
    LOSSES: ClassVar[Values] = {name: name for name in ("kl", "mean", "largest", "top", "experts")}
    NAME: ClassVar[str] = "components"

    @property
    def cause(self) -> ComponentGap | None:
        """The component with the largest KL by itself; `None` if all are zero."""
        parts = [record for record in self.records if record.component != "all" and record.kl > 0]
        return max(parts, key=lambda record: record.kl, default=None)

    def _above(self) -> list[str]:
        cause, whole = self.cause, self[("all",)]
        why = "no component changes it" if cause is None else f"most of it from {cause.component}"
        return [f"{self.tokens} tokens; KL(serving ‖ training) {scientific('kl')(whole)}, {why}"]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, for JSON."""
        cause = self.cause
        return {"tokens": self.tokens, "cause": None if cause is None else cause.component, **super().to_dict()}
