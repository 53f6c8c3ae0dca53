"""What callers hand over, as ndarrays over its memory: NumPy, torch, DLPack, CUDA arrays; and which of it overlaps."""
