"""Quantized weights on the CPU."""
