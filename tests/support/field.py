"""Situations from public reports (`tests/data/field`), played as objects of an API server."""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from exporter.app import build_service
from exporter.counters import Counters
from exporter.demo.objects import Object, format_time
from exporter.demo.store import RESOURCES, ObjectStore, key_of
from exporter.engine.facts.changes import Listed, NodesSeen, Observed
from exporter.engine.facts.model import CLUSTER_RESOURCES, Instant, KubeVirtSettings, Resource
from exporter.engine.store.store import Store
from exporter.health import Health, Watched
from exporter.kube.objects.kubevirt import parse_object
from exporter.server.api.handlers import Service
from exporter.settings import Settings


FIELD = Path(__file__).parents[1] / "data" / "field"
_RESOURCES = {resource.plural: resource for resource in RESOURCES}
_AGO = re.compile(r"@now-(-?\d+)s")


def read_steps(name: str, now: float) -> list[dict[str, Any]]:
    """The steps of a report, with the instants that they had if it were asked at `now`."""
    at = datetime.fromtimestamp(now, UTC)
    text = _AGO.sub(
        lambda match: format_time(at - timedelta(seconds=int(match[1]))),
        (FIELD / f"{name}.json").read_text(encoding="utf-8"),
    )
    steps: list[dict[str, Any]] = json.loads(text)["steps"]
    return steps


def serve(objects: Iterable[tuple[str, Object]], now: Instant) -> Service:
    """What answers about these objects, each with the plural of its resource, at `now`."""
    store = Store(endings_kept=64)
    watched = [Watched(resource, None, synced=True, contact=now) for resource in CLUSTER_RESOURCES]
    service = build_service(
        Settings(),
        store,
        Health(180.0, 600.0, watched),
        counters=Counters(),
        events=None,
        clock=lambda: now,
    )
    store.apply(NodesSeen(seen=True), now)
    store.apply(Observed(KubeVirtSettings(namespace="kubevirt")), now)
    nodes = set()
    for plural, value in objects:
        if plural == "nodes":
            nodes.add(value["metadata"]["name"])
        changed = parse_object(Resource(plural), json.dumps(value).encode())
        store.apply(Observed(changed.fact, changed.reasons), now)
    store.apply(Listed(Resource.NODES, {"": frozenset(nodes)}, None), now)
    return service


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
