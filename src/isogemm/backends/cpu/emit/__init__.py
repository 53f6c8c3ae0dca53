"""Instructions that Numba has not: vectors, atomics, addresses, and the CPU that they are for."""
