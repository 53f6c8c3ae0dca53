"""float32 products by fused multiply-adds."""
