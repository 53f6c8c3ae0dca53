"""A backend of one device, whose kernels are NumPy's object arithmetic on whole numbers."""
