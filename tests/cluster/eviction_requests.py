"""EvictionRequests on real servers: Kubernetes' two controllers, and who asks for what.

The API is off by default, and its controllers are there from Kubernetes 1.38 on:
`tests/tools/build kube-apiserver@1.38.0-beta.0` builds both, and KUBE_APISERVER=1.38.0-beta.0 runs
them.
"""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from exporter.demo import objects
from exporter.demo.objects import Object

from .polling import PATIENCE, poll
from .recording import cleaned, cut
from .resources import EVICTION_REQUESTS, EVICTIONS, NODES
from .rig import Rig
from .servers import ControllerManager
from .versions import RUNNING, is_kubernetes_at_least


RECORDED = Path(__file__).parents[1] / "data" / "evictions"
"""What Kubernetes' controllers and KubeVirt wrote, a file for each case."""
GATE = "--feature-gates=EvictionRequestAPI=true"
SERVED = (GATE, "--runtime-config=lifecycle.k8s.io/v1alpha1=true")
"""The flags with which a kube-apiserver serves EvictionRequests."""
CONTROLLERS = (
    "evictionrequest-controller",
    "imperative-eviction-responder-controller",
    "garbage-collector-controller",
    "disruption-controller",
)
NEEDS_CONTROLLERS = pytest.mark.skipif(
    not is_kubernetes_at_least("1.38"),
    reason=f"Kubernetes {RUNNING['kube-apiserver']}: no controllers of EvictionRequest",
)
"""Skip tests with a Kubernetes that does not answer EvictionRequests."""


def build_request(pod: Object, requester: str, intent: str = "Eviction") -> Object:
    """The EvictionRequest of this requester for a pod, named after the requester."""
    place = pod["metadata"]
    target = {"name": place["name"], "uid": place["uid"]}
    return {
        "apiVersion": EVICTION_REQUESTS.api_version,
        "kind": EVICTION_REQUESTS.kind,
        "metadata": {
            "name": f"{place['name']}-{requester.partition('/')[2]}",
            "namespace": place["namespace"],
        },
        "spec": {"target": {"pod": target}, "requester": requester, "intent": intent},
    }


@asynccontextmanager
async def running_controllers(rig: Rig) -> AsyncIterator[ControllerManager]:
    """Run Kubernetes' controllers of EvictionRequests during the block."""
    control = rig.cluster.control
    login = control.kubeconfig(control.certified("system:kube-controller-manager"))
    async with ControllerManager(control.directory, login, CONTROLLERS, [GATE]) as manager:
        yield manager


class Asking:
    """Who asks for the eviction of a VM of the rig, and what becomes of it."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._admin = rig.cluster.admin

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["Asking"]:
        """A rig whose servers know EvictionRequests."""
        async with Rig.opened(flags=SERVED) as rig, running_controllers(rig):
            yield cls(rig)

    @property
    def rig(self) -> Rig:
        """The cluster."""
        return self._rig

    async def ask(self, pod: Object, requester: str) -> Object:
        """Create an EvictionRequest for a pod."""
        return await self._admin.create(EVICTION_REQUESTS, build_request(pod, requester))

    async def withdraw(self, request: Object) -> None:
        """Set the intent of a request to Withdrawn."""
        place = request["metadata"]
        withdrawn = {"spec": {"intent": "Withdrawn"}}
        await self._admin.merge(EVICTION_REQUESTS, place["namespace"], place["name"], withdrawn)

    async def find(self, pod: Object) -> list[Object]:
        """The Evictions of a pod, oldest first."""
        listed = await self._admin.list(EVICTIONS, pod["metadata"]["namespace"])
        mine = [
            {"apiVersion": EVICTIONS.api_version, "kind": EVICTIONS.kind} | eviction
            for eviction in listed["items"]
            if eviction["spec"]["target"]["pod"]["uid"] == pod["metadata"]["uid"]
        ]
        return sorted(mine, key=lambda eviction: str(eviction["metadata"]["name"]))

    async def until(
        self, pod: Object, holds: Callable[[Object], object], *, within: float = PATIENCE
    ) -> Object:
        """Wait until a pod's newest Eviction meets a condition; returns the Eviction."""
        seen: list[Object] = []

        async def attempt() -> Object | None:
            seen[:] = await self.find(pod)
            return seen[-1] if seen and "status" in seen[-1] and holds(seen[-1]) else None

        try:
            return await poll(attempt, within=within, what="the Eviction")
        except TimeoutError:
            print(json.dumps(seen, indent=1))
            raise

    async def record(self, name: str, source: str, key: str, pod: Object) -> None:
        """Write the Eviction of a VM's pod with all around it if `RECORD` is set.

        Else what the controllers decided is compared with the file.
        """
        scene = await self._rig.look(key)
        evictions = [cleaned(eviction) for eviction in await self.find(pod)]
        path = RECORDED / f"{name}.json"
        if os.environ.get("RECORD"):
            namespace = key.partition("/")[0]
            head = {"apiVersion": EVICTION_REQUESTS.api_version, "kind": EVICTION_REQUESTS.kind}
            requests = (await self._admin.list(EVICTION_REQUESTS, namespace))["items"]
            nodes = (await self._admin.list(NODES))["items"]
            written = {
                "source": source,
                "kubernetes": RUNNING["kube-apiserver"],
                "kubevirt": RUNNING["kubevirt"],
                "now": objects.format_time(datetime.now(UTC)),
                "evictions": evictions,
                "requests": [cleaned(head | request) for request in requests],
                "vmi": cleaned(scene.vmi),
                "vmims": [cleaned(vmim) for vmim in scene.vmims],
                "pods": [cut(cleaned(pod)) for pod in scene.pods],
                "nodes": [cleaned(node) for node in nodes],
                "kubevirt_cr": cleaned(await self._rig.cluster.cr()),
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
        kept = json.loads(path.read_bytes())["evictions"]
        assert [*map(outline, evictions)] == [*map(outline, kept)]


def outline(eviction: Object) -> Object:
    """What Kubernetes' controllers decided about an Eviction, without names and times."""
    status = eviction["status"]
    return {
        "requesters": sorted((row["name"], row["intent"]) for row in status["requesters"]),
        "responders": [(row["name"], row["state"]) for row in status["targetResponders"]],
        "conditions": sorted(
            (row["type"], row["status"], row["reason"]) for row in status["conditions"]
        ),
    }


def state_of(eviction: Object, responder: str) -> str | None:
    """The state of a responder of an Eviction; None if it has no such responder."""
    named = eviction["status"].get("targetResponders", [])
    return next((entry["state"] for entry in named if entry["name"] == responder), None)


def message_of(eviction: Object, responder: str) -> str:
    """The message that a responder wrote last; "" if it wrote none."""
    named = eviction["status"].get("responders", [])
    return next(
        (entry.get("message", "") for entry in named if entry["name"] == responder),
        "",
    )


def condition_of(eviction: Object, name: str) -> tuple[str, str]:
    """Status and reason of a condition of an Eviction; both "" if it has none."""
    conditions = eviction["status"].get("conditions", [])
    return next(
        ((row["status"], row["reason"]) for row in conditions if row["type"] == name), ("", "")
    )
