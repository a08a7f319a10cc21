"""Trims recordings of real nodes for `tests/recorded`: `python -m tests.generate.recorded FOLDER`.

FOLDER holds recordings of watches on a cluster with KubeVirt's own virt-handlers: JSON lines of
`{"at": seconds, "type": ..., "object": ...}`. A sequence has all versions of one VM's objects; a
scene has its objects at one instant.
"""

import argparse
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exporter.demo import objects
from exporter.demo.objects import Object
from tests.cluster.recording import RECORDED
from tests.support.sequences import KINDS


FOLDER = RECORDED / "1.8.4-nodes"
WRITERS = (
    "Real nodes: KubeVirt 1.8.4's virt-operator, virt-api, virt-controller, virt-handler and "
    "virt-launcher, libvirt 11.3 and QEMU 10.0 on two kubelets 1.36.3. Trimmed by "
    "tests.generate.recorded."
)


@dataclass(frozen=True)
class Scene:
    """A state of a recording, at some seconds after its first line."""

    state: str
    recording: str
    vm: str
    at: float


SEQUENCES = {
    "success": ("03-eviction-db1", "db1"),
    "failure": ("08-failed-target-qemu-killed-db2", "db2"),
    "cancelled": ("07-cancelled-while-copying-db2", "db2"),
    "timeout": ("11-completion-timeout", "db2"),
    "unschedulable": ("18-evacuation-unschedulable-then-cancelled", "db2"),
    "target-deleted": ("12-target-pod-deleted-while-copying", "db2"),
}
SCENES = (
    Scene("no_migration", "18-evacuation-unschedulable-then-cancelled", "db2", 1795390727.5),
    Scene("target_unschedulable", "18-evacuation-unschedulable-then-cancelled", "db2", 1795390730),
    Scene("cancelled", "18-evacuation-unschedulable-then-cancelled", "db2", 1795390746),
    Scene("target_not_ready", "19-evacuation-target-cannot-pull-then-recovers", "db2", 1795390770),
    Scene("migrating", "03-eviction-db1", "db1", 1795389352.5),
    Scene("succeeded", "03-eviction-db1", "db1", 1795389356),
)
_STATUS = ("guestOSInfo", "memory", "currentCPUTopology", "kernelBootStatus", "interfaces")
_POD_STATUS = ("initContainerStatuses", "resources", "allocatedResources", "volumeMounts")


def _trim(one: Object) -> Object:
    """An object without fields that no test reads."""
    copy = objects.copy(one)
    copy["metadata"].pop("managedFields", None)
    copy["metadata"].get("annotations", {}).pop(
        "kubectl.kubernetes.io/last-applied-configuration", None
    )
    if copy["kind"] == "Pod":
        spec = copy["spec"]
        kept = ("nodeName", "nodeSelector", "readinessGates")
        copy["spec"] = {key: spec[key] for key in kept if key in spec}
        copy["spec"]["containers"] = [{"name": "compute", "image": "virt-launcher"}]
        for key in _POD_STATUS:
            copy["status"].pop(key, None)
        for container in copy["status"].get("containerStatuses", []):
            for key in _POD_STATUS:
                container.pop(key, None)
    else:
        spec = copy["spec"]
        copy["spec"] = {key: spec[key] for key in ("evictionStrategy", "vmiName") if key in spec}
        for key in _STATUS:
            copy.get("status", {}).pop(key, None)
    return copy


def _is_of(one: Object, vm: str) -> bool:
    name = one["spec"].get("vmiName") or objects.annotations(one).get(objects.DOMAIN)
    return str(name or one["metadata"]["name"]) == vm


def _read(folder: Path, recording: str, vm: str) -> list[tuple[float, str, Object]]:
    lines = (folder / f"{recording}.jsonl").read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [
        (event["at"], event["type"], _trim(event["object"]))
        for event in events
        if event["object"]["kind"] in KINDS and _is_of(event["object"], vm)
    ]


def write_sequence(folder: Path, name: str) -> None:
    """Write all versions of one VM's objects in a recording, without objects that never changed."""
    found = [one for _, kind, one in _read(folder, *SEQUENCES[name]) if kind != "DELETED"]
    versions: dict[str, list[Object]] = {}
    for one in found:
        versions.setdefault(one["metadata"]["uid"], []).append(one)
    changed = [one for one in found if len(versions[one["metadata"]["uid"]]) > 1]
    text = "".join(json.dumps(one, sort_keys=True) + "\n" for one in changed)
    (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_scene(folder: Path, scene: Scene) -> None:
    """Write a VM's objects at one time, in the format of the rig's recordings."""
    there: dict[str, Object] = {}
    for at, kind, one in _read(folder, scene.recording, scene.vm):
        if at <= scene.at:
            there.pop(one["metadata"]["uid"], None)
            if kind != "DELETED":
                there[one["metadata"]["uid"]] = one
    of = {
        short: [one for one in there.values() if KINDS[one["kind"]] == short]
        for short in KINDS.values()
    }
    (vmi,) = of["VMI"]
    body = {
        "state": scene.state,
        "source": WRITERS,
        "kubevirt": FOLDER.name,
        "now": objects.format_time(datetime.fromtimestamp(scene.at, UTC)),
        "vmi": vmi,
        "vmims": of["VMIM"],
        "pods": of["pod"],
        "kubevirt_cr": None,
        "others": [],
    }
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    (FOLDER / f"{scene.state}.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write all sequences and scenes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    FOLDER.mkdir(exist_ok=True)
    for name in SEQUENCES:
        write_sequence(folder, name)
    for scene in SCENES:
        write_scene(folder, scene)


if __name__ == "__main__":
    main()
