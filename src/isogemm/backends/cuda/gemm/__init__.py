"""Products of floats on CUDA: a family of kernels to a folder."""
