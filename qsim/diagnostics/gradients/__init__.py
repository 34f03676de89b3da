"""How far rounding moves a gradient: bias and variance, by point and by layer, and what a larger batch repairs."""
