"""Measurements. Each module is one: `qsim bench NAME` calls its `add_arguments(parser)` and `main(args)`."""
