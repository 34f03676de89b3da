"""The effects of rounding: on a model in training, on weight updates, on gradients, and on each operation of a run."""

from qsim.diagnostics.advice import Advice, Problem
from qsim.diagnostics.assignment.assign import assign
from qsim.diagnostics.assignment.assignment import Assignment, Uniform
from qsim.diagnostics.assignment.choices import PointChoice
from qsim.diagnostics.assignment.sensitivity import Sensitivities, Sensitivity
from qsim.diagnostics.block_counts import BlockCounts, BlockSamples
from qsim.diagnostics.cancelled import CancelledUpdates, cancelled_updates
from qsim.diagnostics.counts import Counts, Sample
from qsim.diagnostics.gradients.batches import BatchFactor, BatchFactors, batch_for
from qsim.diagnostics.gradients.error import GradientError
from qsim.diagnostics.gradients.errors import GradientErrors, gradient_error
from qsim.diagnostics.gradients.statistics import Estimate
from qsim.diagnostics.monitor import Monitor
from qsim.diagnostics.rollout.gap import ComponentGap, RolloutGap
from qsim.diagnostics.rollout.twin import RolloutTwin, twin
from qsim.diagnostics.traces.compare import compare
from qsim.diagnostics.traces.comparison import RunComparison, TensorDifference
from qsim.diagnostics.traces.run import trace
from qsim.diagnostics.traces.trace import Operation, Trace
from qsim.diagnostics.updates import UpdateCounts, Updates
from qsim.functional.backends import Backend, backends
from qsim.text.records import Records

__all__ = [
    "Advice",
    "Assignment",
    "Backend",
    "BatchFactor",
    "BatchFactors",
    "BlockCounts",
    "BlockSamples",
    "CancelledUpdates",
    "ComponentGap",
    "Counts",
    "Estimate",
    "GradientError",
    "GradientErrors",
    "Monitor",
    "Operation",
    "PointChoice",
    "Problem",
    "Records",
    "RolloutGap",
    "RolloutTwin",
    "RunComparison",
    "Sample",
    "Sensitivities",
    "Sensitivity",
    "TensorDifference",
    "Trace",
    "Uniform",
    "UpdateCounts",
    "Updates",
    "assign",
    "backends",
    "batch_for",
    "cancelled_updates",
    "compare",
    "gradient_error",
    "trace",
    "twin",
]
