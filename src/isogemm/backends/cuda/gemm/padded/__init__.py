"""Hopper's kernels for operands that no tensor map can read: copied first, to lines that are multiples of 16 bytes."""
