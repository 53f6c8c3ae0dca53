"""Device code, one algorithm to a file: Triton in ``.py``, CUDA C++ in ``.cu``."""
