"""How figures of studies look: as all figures do."""

from qsim.figures import LOOKS, REFERENCE, Look, band, legend, panels, plain_numbers, save, style

__all__ = ["LOOKS", "REFERENCE", "Look", "band", "legend", "panels", "plain_numbers", "save", "style"]
