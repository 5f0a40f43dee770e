"""The target service: owns the model, verifies token chains, emits auxiliary hidden states."""
