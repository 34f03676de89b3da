"""Code shared by tests: oracles, inputs, models, and pools of processes."""
