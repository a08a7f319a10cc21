"""Reading the blocked set without an event loop."""

from exporter.engine.facts.model import Checkpoint
from exporter.server.api.blocked_set import Blocked, BlockedSet


def read(blocked: BlockedSet, checkpoint: Checkpoint | None) -> Blocked:
    """The blocked set, computed without an event loop."""
    reading = blocked.read(checkpoint)
    while True:
        try:
            reading.send(None)
        except StopIteration as done:
            blocked_set: Blocked = done.value
            return blocked_set
