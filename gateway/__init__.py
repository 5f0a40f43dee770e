"""The gateway: runs the rounds, serves clients, exports acceptance metrics."""

import outrider as outrider  # before grpc: it says how that works
