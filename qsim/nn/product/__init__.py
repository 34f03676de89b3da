"""A product whose operands and gradients are rounded at five points."""
