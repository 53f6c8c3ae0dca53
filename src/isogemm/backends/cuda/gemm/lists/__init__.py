"""Lists of products in one launch."""
