"""Products of floats on the CPU."""
