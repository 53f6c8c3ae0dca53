"""The command line."""

from __future__ import annotations

from .commands import app, command_line, main

__all__ = ["app", "command_line", "main"]
