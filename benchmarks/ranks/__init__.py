"""Several ranks of one machine, by bits and by time: ``python -m benchmarks.ranks``."""
