"""The blocked set, read at once."""

from exporter.engine.model import Checkpoint
from exporter.server.blocked import Blocked, BlockedSet


def read(blocked: BlockedSet, checkpoint: Checkpoint | None) -> Blocked:
    """The set of a small store, which is computed without yielding."""
    try:
        blocked.read(checkpoint).send(None)
    except StopIteration as done:
        found: Blocked = done.value
        return found
    raise AssertionError("it yielded")
