"""Products by wgmma and the tensor copy engine."""
