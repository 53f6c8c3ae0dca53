"""GGUF's block formats: bytes, fields, decoding, the definition of quantized products' weights."""
