"""Algorithms of cuBLASLt that were seen to have the contract's bits."""
