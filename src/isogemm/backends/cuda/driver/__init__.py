"""The driver, compilers and device facts."""
