"""What is multiplied: shapes, dtypes, layouts and settings, checked."""
