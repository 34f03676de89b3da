"""Measurements, one per module: `qsim bench NAME` calls its `add_arguments(parser)` and `main(args)`."""
