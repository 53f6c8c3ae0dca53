"""Whole models on one device: bits in every relation, training steps, grouped products, attention's gradient, load."""
