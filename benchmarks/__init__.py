"""Benchmarks: thin scripts over `isogemm.lab`. They assert no times; tests do not import their results."""
