"""The audit log of the API server: who created what."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .objects import Object
from .resources import PODS, VMIMS


POLICY: Object = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "RequestResponse",
            "verbs": ["create"],
            "resources": [{"group": VMIMS.group, "resources": [VMIMS.plural]}],
        },
        {
            "level": "Metadata",
            "verbs": ["create"],
            "resources": [{"group": PODS.group, "resources": [f"{PODS.plural}/eviction"]}],
        },
        {"level": "None"},
    ],
}
"""Log only created migrations, with their whole content, and evictions, with their metadata."""


@dataclass(frozen=True, slots=True)
class Creation:
    """One request to create an object: who, when, what, and the answer."""

    at: datetime
    user: str
    resource: str
    namespace: str
    name: str
    """Empty if the server chooses the name."""
    code: int
    message: str
    made: Object
    """The created object; only migrations have it."""
    notes: Object
    """The audit annotations, for example those of webhooks."""


def read_audit(log: Path) -> list[Creation]:
    """The requests of an audit log, oldest first, without an unfinished last line."""
    whole = log.read_text().rpartition("\n")[0]
    return sorted(map(_read, whole.splitlines()), key=lambda entry: entry.at)


def _read(line: str) -> Creation:
    event = json.loads(line)
    about = event["objectRef"]
    answer = event.get("responseStatus", {})
    subresource = about.get("subresource")
    return Creation(
        at=datetime.fromisoformat(event["requestReceivedTimestamp"]),
        user=event["user"]["username"],
        resource=f"{about['resource']}/{subresource}" if subresource else about["resource"],
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=answer.get("code", 0),
        message=answer.get("message", ""),
        made=event.get("responseObject", {}),
        notes=event.get("annotations", {}),
    )
