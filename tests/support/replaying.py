"""Reads recordings, and replays their events."""

from collections.abc import Iterable
from io import BufferedReader, BytesIO

from exporter.whatif import recording
from exporter.whatif.account import Comparison, Contender
from exporter.whatif.recording import Faults, Recorded
from exporter.whatif.replay import Replay


def play(events: Iterable[Recorded], contenders: Iterable[Contender]) -> Comparison:
    """Replay all events; returns the comparison of the policies."""
    replay = Replay(contenders)
    for event in events:
        replay.take(event)
    return replay.finish()


def a_file(body: bytes) -> BufferedReader:
    """An open file with this content."""
    return BufferedReader(BytesIO(body))


def read_file(body: bytes) -> tuple[list[Recorded], Faults]:
    """The events of a file with this content, and its faults."""
    faults = Faults()
    return list(recording.read(recording.split(a_file(body), faults), faults)), faults
