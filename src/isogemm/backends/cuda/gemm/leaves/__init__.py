"""Leaves of K side by side, and the kernel that adds their sums in the order of the contract."""
