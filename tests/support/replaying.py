"""Plays the events of a recording."""

from collections.abc import Iterable

from exporter.whatif.account import Comparison, Contender
from exporter.whatif.recording import Recorded
from exporter.whatif.replay import Replay


def play(events: Iterable[Recorded], contenders: Iterable[Contender]) -> Comparison:
    """Play all events; returns the account of each policy."""
    replay = Replay(contenders)
    for event in events:
        replay.take(event)
    return replay.finish()
