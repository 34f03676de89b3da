"""What happened in there: what rounding does to a model while it trains."""

from qsim.diagnostics.cancelled import CancelledUpdates, cancelled_updates
from qsim.diagnostics.counts import Counts, Sample
from qsim.diagnostics.monitor import Monitor

__all__ = ["CancelledUpdates", "Counts", "Monitor", "Sample", "cancelled_updates"]
