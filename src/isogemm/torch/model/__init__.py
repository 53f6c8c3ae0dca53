"""Whole models: which modules are converted, and into what."""
