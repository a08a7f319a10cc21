"""The fields that a migration writes to VMI, VMIMs and launcher pods, in order.

A sequence has all versions of these objects, as a watch reports them. The sequences of real nodes
are in `tests/data/recorded/VERSION-nodes/*.jsonl`; the simulated cluster makes its own sequences.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from exporter.demo.objects import Object


KINDS = {
    "VirtualMachineInstance": "VMI",
    "VirtualMachineInstanceMigration": "VMIM",
    "Pod": "pod",
}
LEFT_OUT = re.compile(
    r"\.(kind|apiVersion|spec|metadata\.(managedFields|resourceVersion|generation)"
    # The exporter does not read these fields, which the kubelet or virt-controller writes.
    r"|status\.(activePods|\w*[cC]ontainerStatuses|\w*IPs?|resources|allocatedResources|startTime"
    r"|observedGeneration|conditions\[\w+\]\.observedGeneration"
    r"|conditions\[(Initialized|ContainersReady|PodReadyToStartContainers)\]))(?=[.\[]|$)"
)


def read_sequence(path: Path) -> list[Object]:
    """The versions in a recorded sequence, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_written(versions: Iterable[Object]) -> list[str]:
    """The fields that the versions add, change or (with a minus) remove, in order."""
    last: dict[str, dict[str, str]] = {}
    written: dict[str, None] = {}
    for version in versions:
        kind, uid = KINDS[version["kind"]], version["metadata"]["uid"]
        now = dict(_flatten(version, ""))
        before = last.get(uid)
        last[uid] = now
        if before is None:
            continue
        gone = [f"-{kind}{path}" for path in before if path not in now]
        new = [f"{kind}{path}" for path, value in now.items() if before.get(path) != value]
        written |= dict.fromkeys([*gone, *new])
    return list(written)


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each leaf with its path; items of a list are named by their type, phase or name."""
    if LEFT_OUT.match(path):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            # The ports of a migration are keys of a map.
            yield from _flatten(inner, f"{path}.{'PORT' if key.isdigit() else key}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            name = item.get("type") or item.get("phase") or item.get("name")
            yield from _flatten(item, f"{path}[{name}]")
    else:
        yield path, json.dumps(value)
