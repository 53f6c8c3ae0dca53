"""Attention on CUDA."""
