"""Block formats: an element format, and a scale that neighbours share."""

from qsim.scaling.block import *  # noqa: F403
