"""Gradients of attention by kernels that hold no scores in memory."""
