"""What tests share: oracles, inputs, models, and pools of processes."""
