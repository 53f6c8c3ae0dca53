"""float32 products on tensor cores: tf32 and tf32x3."""
