"""The objects of one VMI on a real cluster, and the files that record them."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exporter.demo import objects
from exporter.demo.objects import Object
from exporter.kube.objects.places import SCHEDULABLE

from .kubevirt import KubeVirtCluster
from .versions import RUNNING


RECORDED = Path(__file__).parents[1] / "data" / "recorded"
"""A folder for each version of KubeVirt."""

_IS_RECORDING = bool(os.environ.get("RECORD"))
_CUT = "Pod specs are cut to nodes and containers."
_POD_SPEC = (
    "nodeName",
    "nodeSelector",
    "affinity",
    "restartPolicy",
    "schedulerName",
    "schedulingGates",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """A VMI with its migrations and launcher pods, oldest first, as the API server returns them."""

    vmi: Object
    vmims: list[Object]
    pods: list[Object]

    @property
    def phases(self) -> list[str]:
        """The phases of the migrations."""
        return [objects.phase(vmim) for vmim in self.vmims]

    @property
    def marked(self) -> str:
        """The node that the VMI is to leave, "" if there is none."""
        return objects.evacuated_node(self.vmi)

    @property
    def state(self) -> Object:
        """`status.migrationState`; empty if there is none."""
        return objects.state_of(self.vmi)

    @property
    def outline(self) -> Object:
        """The scene without names and times; runs that end the same way have equal outlines."""
        return {
            "vmi": _outline(self.vmi) | {"marked": bool(self.marked), "state": sorted(self.state)},
            "vmims": [
                _outline(vmim)
                | {
                    "priority": vmim["spec"].get("priority"),
                    "state": sorted(objects.state_of(vmim)),
                    "passed": [
                        entry["phase"] for entry in vmim["status"]["phaseTransitionTimestamps"]
                    ],
                }
                for vmim in self.vmims
            ],
            "pods": [_outline(pod) | {"bound": bool(objects.node_of(pod))} for pod in self.pods],
        }


async def record(
    cluster: KubeVirtCluster, name: str, source: str, scene: Scene, others: Iterable[Scene] = ()
) -> None:
    """Write the scene to its file if `RECORD` is set; else compare it with the file.

    The file is named after the state, its folder after KubeVirt's version; `further/STATE.case` is
    another case of the state. `others` are VMIs of the same cluster that explain the state.
    """
    path = RECORDED / RUNNING["kubevirt"] / f"{name}.json"
    listed = [cleaned(document) for scene in others for document in (scene.vmi, *scene.vmims)]
    keep(path, source, scene, {"kubevirt_cr": cleaned(await cluster.cr()), "others": listed})


def keep(path: Path, source: str, scene: Scene, around: Object) -> None:
    """Write a scene and what is around it to its file, or compare it, as `record` does."""
    if _IS_RECORDING:
        body = around | {
            "state": path.name.partition(".")[0],
            "source": f"{source} {_CUT}",
            "kubevirt": RUNNING["kubevirt"],
            "now": objects.format_time(datetime.now(UTC)),
            "vmi": cleaned(scene.vmi),
            "vmims": [cleaned(vmim) for vmim in scene.vmims],
            "pods": [cut(cleaned(pod)) for pod in scene.pods],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    kept = json.loads(path.read_bytes())
    before = Scene(kept["vmi"], kept["vmims"], kept["pods"]).outline
    differences = list(_find_differences("", before, scene.outline))
    assert not differences, "\n".join([f"{path.relative_to(RECORDED)} differs:", *differences])


def cut_node(node: Object) -> Object:
    """What the exporter reads of a node."""
    name, labels = node["metadata"]["name"], objects.labels(node)
    kept = {key: labels[key] for key in (SCHEDULABLE, "kubernetes.io/hostname") if key in labels}
    spec = {key: node["spec"][key] for key in ("taints", "unschedulable") if key in node["spec"]}
    status = {"conditions": node["status"]["conditions"]}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": kept},
        "spec": spec,
        "status": status,
    }


def _outline(made: Object) -> Object:
    conditions = made["status"].get("conditions", [])
    return {
        "phase": objects.phase(made),
        "conditions": sorted(f"{row['type']}={row['status']}" for row in conditions),
        "labels": sorted(objects.labels(made)),
        "annotations": sorted(objects.annotations(made)),
    }


def _find_differences(at: str, kept: Any, seen: Any) -> Iterator[str]:
    """A line for each value that differs between the outlines, with its path."""
    if isinstance(kept, dict) and isinstance(seen, dict):
        for key in sorted(kept.keys() | seen.keys()):
            yield from _find_differences(f"{at}.{key}", kept.get(key), seen.get(key))
    elif _is_of_objects(kept) and _is_of_objects(seen) and len(kept) == len(seen):
        for number, pair in enumerate(zip(kept, seen, strict=True)):
            yield from _find_differences(f"{at}[{number}]", *pair)
    elif kept != seen:
        yield f"  {at.lstrip('.')}: kept {kept}, seen {seen}"


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, dict) for entry in value)


def cleaned(made: Object) -> Object:
    """A copy of an object without `managedFields`."""
    return objects.changed(made, lambda copy: copy["metadata"].pop("managedFields", None))


def cut(pod: Object) -> Object:
    """A launcher pod without the parts of its spec that the exporter does not read."""
    spec = {key: pod["spec"][key] for key in _POD_SPEC if key in pod["spec"]}
    names = [{key: row[key] for key in ("name", "image")} for row in pod["spec"]["containers"]]
    return pod | {"spec": spec | {"containers": names}}
