"""Checkpoints: a converted model saved and loaded to the bit, and exported as real low-precision numbers.

Needs the extra `export`: `pip install 'qsim-torch[export]'`.
"""

from qsim.checkpoints.exporting import export
from qsim.checkpoints.outcomes import Export, ExportedLayer
from qsim.checkpoints.reading import points
from qsim.checkpoints.saving import load, save

__all__ = ["Export", "ExportedLayer", "export", "load", "points", "save"]
