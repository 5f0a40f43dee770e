"""The target service: owns the model, verifies token chains, emits auxiliary hidden states."""

import os

import outrider as outrider  # before grpc: it says how that works

# Threads that wait for each other within a step spin this long (some 25 us), then sleep; OpenMP's default is several
# milliseconds, in which the draft and the gateway on the same cores could work. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
