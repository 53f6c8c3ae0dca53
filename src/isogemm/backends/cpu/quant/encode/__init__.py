"""Weights to blocks: a routine to a format, and whole matrices block by block."""
