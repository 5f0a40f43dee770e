"""The gateway: runs the rounds, serves clients, exports acceptance metrics."""
