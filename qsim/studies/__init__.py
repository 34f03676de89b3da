"""Studies: one command runs an experiment and writes a report on the cost of rounding.

On the command line, `qsim study` lists them and `qsim study NAME` runs one. From Python:

    report = qsim.studies.run("gradient-variance", out="results")

`sweep` compares points, batch sizes and learning rates on a model and data of your own, and functions such as `compare_formats` are
sweeps with the points of one question.

Needs the extra `study`: `pip install 'qsim-torch[study]'`.

Example:
    >>> from qsim import studies
    >>> studies.names()[:2]
    ['accumulator', 'batch-size']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsim.studies.plans import Duration, Plan, plan, run
    from qsim.studies.report import Claim, Picture, Report
    from qsim.studies.result import Result
    from qsim.studies.study import Study
    from qsim.studies.sweeps import Sweep, sweep
    from qsim.studies.sweeps.shortcuts import (
        compare_accumulators,
        compare_batch_sizes,
        compare_formats,
        compare_learning_rates,
        compare_points,
        compare_random_bits,
        compare_recipes,
    )
    from qsim.text.tables import Table

__all__ = [
    "Claim",
    "Duration",
    "Picture",
    "Plan",
    "Report",
    "Result",
    "Study",
    "Sweep",
    "Table",
    "compare_accumulators",
    "compare_batch_sizes",
    "compare_formats",
    "compare_learning_rates",
    "compare_points",
    "compare_random_bits",
    "compare_recipes",
    "named",
    "names",
    "plan",
    "run",
    "sweep",
]

_STUDIES = {
    "accumulator": "accumulator.AccumulatorStudy",
    "batch-size": "batch_size.BatchSizeStudy",
    "cancelled-updates": "cancelled_updates.CancelledUpdatesStudy",
    "formats": "formats.FormatsStudy",
    "gradient-variance": "gradient_variance.GradientVarianceStudy",
    "hardware-cost": "hardware_cost.HardwareCostStudy",
    "learning-rate": "learning_rate.LearningRateStudy",
    "llm": "llm.LLMStudy",
    "points": "points.PointsStudy",
    "random-bits": "random_bits.RandomBitsStudy",
    "random-walk": "random_walk.RandomWalkStudy",
    "recipes": "recipes.RecipesStudy",
    "replicas": "replicas.ReplicasStudy",
    "replications": "replications.ReplicationsStudy",
    "stagnation": "stagnation.StagnationStudy",
}
#: Where the public names are, in the order in which they are looked up.
_HOMES = ("studies.report", "studies.result", "text.tables", "studies.study", "studies.plans", "studies.sweeps", "studies.sweeps.shortcuts")


def names() -> list[str]:
    """The names of all studies.

    Example:
        >>> from qsim import studies
        >>> "batch-size" in studies.names()
        True
    """
    return sorted(_STUDIES)


def named(name: str) -> Study[Any, Any]:
    """The study with this name.

    Raises:
        ValueError: If no study has this name.

    Example:
        >>> from qsim import studies
        >>> studies.named("batch-size").question
        'Does a larger batch buy back bits of precision?'
    """
    if name not in _STUDIES:
        raise ValueError(f"no study is called {name!r}. There are: {', '.join(names())}")
    module, _, kind = _STUDIES[name].partition(".")
    study: Study[Any, Any] = getattr(importlib.import_module(f"qsim.studies.{module}"), kind)()
    return study


def __getattr__(name: str) -> Any:
    # Submodules are imported on first use: matplotlib and SciPy are slow to import, and may not be installed.
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"qsim.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'qsim.studies' has no attribute {name!r}")
