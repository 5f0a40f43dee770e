"""Checks and times the Triton forms at the shapes of gpt-oss-120b: `python -m kernels.bench`.

Needs PyTorch, NumPy, Triton and this repository on the path, nothing installed.
"""
