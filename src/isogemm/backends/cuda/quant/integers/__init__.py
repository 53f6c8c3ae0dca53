"""Products of codes in integers."""
