"""What only a device can show; skipped without one: `python -m pytest tests/device tests/kernels/triton_forms`."""
