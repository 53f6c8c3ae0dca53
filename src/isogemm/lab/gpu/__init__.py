"""Times and comparisons of kernels on a GPU."""
