"""Comparisons of groups of processes with a process alone."""
