"""Sums over ranks, and rows of all ranks, through memory that several GPUs map."""
