"""The public calls: from arguments to a checked problem to a device."""
