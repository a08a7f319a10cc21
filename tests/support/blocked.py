"""The blocked set, read at once."""

from exporter.engine.model import Checkpoint
from exporter.server.blocked_set import Blocked, BlockedSet


def read(blocked: BlockedSet, checkpoint: Checkpoint | None) -> Blocked:
    """The set, computed to its end without an event loop: whenever it yields, it goes on."""
    reading = blocked.read(checkpoint)
    while True:
        try:
            reading.send(None)
        except StopIteration as done:
            found: Blocked = done.value
            return found
