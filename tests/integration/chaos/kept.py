"""Stored histories, written and read with the format's own functions."""

import gzip
import time
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path

import msgspec

from exporter.engine.facts.evidence import Remembered
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import Outcome
from exporter.history.format import encode, seal, shard_of, split
from exporter.history.reader import DATA_KEY
from tests.cluster.objects import Object
from tests.support.stored_history import read_shard


DAY = 86_400.0


def remembered(made: Object, endings: int) -> Remembered:
    """The stored history of a VMI: `endings` migrations of a minute each, without VMIMs."""
    now = float(int(time.time()))
    metadata = made["metadata"]
    return Remembered(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        migrations={
            f"{metadata['uid'][:24]}{number:012x}": Migration(
                start=now - 60.0 * number - 60,
                end=now - 60.0 * number,
                outcome=Outcome.SUCCEEDED,
                handed_off=True,
            )
            for number in range(1, endings + 1)
        },
    )


def shards(several: Iterable[Remembered]) -> dict[int, bytes]:
    """The sealed shards of these entries, by number."""
    found: dict[int, list[Remembered]] = {}
    for one in sorted(several, key=lambda one: one.uid):
        found.setdefault(shard_of(one.uid), []).append(one)
    now = time.time()
    return {
        shard: seal(encode(one, now=now, window=DAY) for one in found[shard])
        for shard in sorted(found)
    }


def counted(raw: bytes) -> dict[str, int]:
    """Each VMI's number of migrations in these shards, by UID. Raises if a shard is damaged."""
    return {one.uid: len(one.migrations) for piece in split(raw) for one in read_shard(piece)}


def counted_in(path: Path) -> dict[str, int]:
    """The number of migrations of each VMI in a file, by UID."""
    return counted(path.read_bytes())


def shard_bytes(config_maps: Iterable[Object]) -> dict[str, bytes]:
    """The sealed shard of every ConfigMap that has one, by the ConfigMap's name."""
    return {
        one["metadata"]["name"]: b64decode(one["binaryData"][DATA_KEY])
        for one in config_maps
        if DATA_KEY in one.get("binaryData", {})
    }


def another_version(payload: bytes, version: int = 2) -> bytes:
    """A shard as a later version of the program would write it."""
    return gzip.compress(msgspec.msgpack.encode([version, payload]), mtime=0)
