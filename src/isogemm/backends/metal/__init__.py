"""The kernels in Metal's own language, as text, and their launch where torch has MPS."""
