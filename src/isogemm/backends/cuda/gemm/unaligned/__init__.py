"""Products of few rows with weights out of step, which are read once, as they lie."""
