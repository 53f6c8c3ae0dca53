"""Quantized weights on CUDA."""
