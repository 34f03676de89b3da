"""Checkpoints: a converted model saved and loaded to the bit, and exported as real low-precision numbers.

Needs the extra `export`: `pip install 'qsim-torch[export]'`.
"""

from qsim.checkpoints.dry_runs import DryRun
from qsim.checkpoints.exporting import Export, export
from qsim.checkpoints.reading import points
from qsim.checkpoints.saving import load, save

__all__ = ["DryRun", "Export", "export", "load", "points", "save"]
