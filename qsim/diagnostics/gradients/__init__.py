"""The effect of rounding on gradients: bias and variance, by point and by layer, and the batch size that compensates."""
