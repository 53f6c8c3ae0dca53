"""Models of transformers: which modules are taken for what."""
