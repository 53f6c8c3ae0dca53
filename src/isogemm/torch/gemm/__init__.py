"""Products with gradients."""
