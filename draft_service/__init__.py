"""The draft service: proposes token chains from the hidden states of the target."""

import outrider as outrider  # before grpc: it says how that works
