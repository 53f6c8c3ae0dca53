"""The CUDA backend: kernel families that compete on speed and are admitted by their bits."""
