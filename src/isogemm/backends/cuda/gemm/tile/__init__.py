"""Products by Triton: the plain kernels that others are compared with."""
