"""Quantized weights in torch."""
