"""Everything wrong with a checkpoint at once: faults are collected, then one error lists them all."""

from __future__ import annotations

from outrider.checkpoint import CheckpointError


class Faults:
    """Collects faults of one checkpoint. `subject` is what the error's first line is about."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Records one fault; the same fault is recorded once."""
        if message not in self.messages:
            self.messages.append(message)

    def __bool__(self) -> bool:
        return bool(self.messages)

    def raise_if_any(self) -> None:
        """Raises CheckpointError that lists every fault, if there is one."""
        if self.messages:
            count = "1 fault" if len(self.messages) == 1 else f"{len(self.messages)} faults"
            raise CheckpointError("\n  - ".join([f"{self.subject}: {count}", *self.messages]))
