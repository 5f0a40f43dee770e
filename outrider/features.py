"""Names of optional parts of the contract, as services list them in `features`."""

TARGET_ROUNDS = "target-rounds"
"""A target makes steps without a chain by itself, under a grant that names no draft."""
