"""Situations from public reports (`tests/data/field`), played as objects of an API server."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from exporter.demo.objects import Object, format_time
from exporter.demo.store import RESOURCES, ObjectStore, key_of


FIELD = Path(__file__).parents[1] / "data" / "field"
_RESOURCES = {resource.plural: resource for resource in RESOURCES}
_AGO = re.compile(r"@now-(-?\d+)s")


def read_steps(name: str, now: float) -> list[dict[str, Any]]:
    """The steps of a report, with the instants that they had if it were asked at `now`."""
    at = datetime.fromtimestamp(now, UTC)
    text = _AGO.sub(
        lambda found: format_time(at - timedelta(seconds=int(found[1]))),
        (FIELD / f"{name}.json").read_text(encoding="utf-8"),
    )
    steps: list[dict[str, Any]] = json.loads(text)["steps"]
    return steps


class FieldStore(ObjectStore):
    """An object store that takes objects as they are, with their UIDs, times and status."""

    def __init__(self) -> None:
        super().__init__(lambda: datetime.now(UTC))

    def apply(self, plural: str, given: Object) -> None:
        """Create or replace an object."""
        resource = _RESOURCES[plural]
        metadata = dict(given["metadata"])
        namespace = metadata.get("namespace") if resource.namespaced else None
        old = self.caches[resource].entries.get(key_of(namespace, metadata["name"]))
        self._write(resource, {**given, "metadata": metadata}, old)

    def play(self, name: str) -> Iterator[dict[str, str]]:
        """Apply the objects of a report in order, up to each question that it asks."""
        for step in read_steps(name, self.clock().timestamp()):
            if "apply" in step:
                self.apply(step["apply"], step["object"])
            else:
                yield step
