"""Numerical operations.

Each file is one operation: the PyTorch form that defines it, faster forms, one function that chooses."""
