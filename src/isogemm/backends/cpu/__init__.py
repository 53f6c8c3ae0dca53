"""The CPU backend: every supported contract on NumPy views."""
