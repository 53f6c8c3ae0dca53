"""The kernels of the WebGPU backend on this machine's adapter: ``python -m benchmarks.webgpu``."""
