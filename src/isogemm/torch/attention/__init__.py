"""Attention with gradients."""
