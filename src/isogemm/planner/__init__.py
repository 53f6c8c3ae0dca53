"""Planning: which kernel computes a product, why, and what was measured."""
