"""The simulated API server for people with kubectl: discovery, evictions, cancelling, logs, events.

With it, each command of the runbooks about a VM can be tried on the demo. The paths and answers are
those of kube-apiserver and virt-api (`evacuate_cancel.go`).
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from exporter.demo import objects, status, webhooks
from exporter.demo.apiserver import SimulatedApiServer, respond_error, respond_json
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.status import ApiResource, StatusError
from exporter.demo.store import MIGRATIONS, NODES, PODS, RESOURCES, VMIS, decode


VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
EVENTS = ApiResource("", "v1", "events", "Event")
SHORT_NAMES = {"VirtualMachineInstance": ["vmi"], "VirtualMachineInstanceMigration": ["vmim"]}
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
INTERCEPTOR = "virt-launcher-eviction-interceptor.kubevirt.io"


class PracticeServer(SimulatedApiServer):
    """Serves a cluster's store, and the other endpoints that kubectl and the runbooks need."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.store)
        self._cluster = cluster

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        try:
            answer = await self._practise(http)
        except StatusError as error:
            return respond_error(error)
        if answer is None:
            return await super()._handle(http)
        return respond_json(msgspec.json.encode(answer), 201 if http.method == "POST" else 200)

    async def _practise(self, http: web.Request) -> object:
        """The answer to a request of kubectl or a runbook; None for a request for a resource."""
        path = http.path.strip("/").split("/")
        if http.method == "GET":
            return _discover(path) or self._read(http, path)
        answer: object = None
        match http.method, path:
            case "PATCH", ["api", "v1", "nodes", name] if http.content_type == STRATEGIC_PATCH:
                changes = await http.json()
                answer = self.store.patch(NODES, None, name, changes, subresource=False)
            case "POST", ["api", "v1", _, namespace, "pods", name, "eviction"]:
                answer = self._evict(namespace, name)
            case "PUT", ["apis", _, "v1", _, namespace, _, name, "evacuate", "cancel"]:
                answer = self._cancel(namespace, name, await http.json())
            case _:
                pass
        return answer

    def _read(self, http: web.Request, path: list[str]) -> object:
        match path:
            case ["api", "v1", *_, "events"]:
                return {"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": []}
            case ["api", "v1", "pods"] if "spec.nodeName" in http.query_string:
                return self._list_pods(http.query["fieldSelector"])
            case ["api", "v1", _, namespace, "pods", name, "log"]:
                raise web.HTTPOk(text=self._read_log(namespace, name))
            case _:
                return None

    def _evict(self, namespace: str, name: str) -> Object:
        """Evict a pod, and answer like kube-apiserver with KubeVirt's validating webhook."""
        answer = self._cluster.evict(namespace, name)
        if answer.code == 200:
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        if answer.code == 404:
            raise status.not_found(PODS, name)
        message = f'admission webhook "{INTERCEPTOR}" denied the request: {answer.message}'
        raise StatusError(status.failure(answer.code, "TooManyRequests", message))

    def _cancel(self, namespace: str, name: str, body: Object) -> Object:
        vmi = self.store.get(VMIS, namespace, name)
        if body.get("evacuationNodeName") != objects.evacuated_node(vmi):
            message = "the VMI is not being evacuated from that node"
            raise StatusError(status.failure(500, "InternalError", message))
        self._cluster.change_vmi(namespace, name, webhooks.cancel_evacuation)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _read_log(self, namespace: str, name: str) -> str:
        """The launcher's log lines about the known failed migrations that started from it."""
        pod = self.store.get(PODS, namespace, name)
        vmi = self.store.find(VMIS, *objects.owner_key(pod).split("/")) or {}
        finished = [decode(entry) for entry in self.store.caches[MIGRATIONS].all()]
        states = {
            state["migrationUid"]: state
            for state in map(objects.state_of, [*finished, vmi])
            if state and state.get("sourcePod") == name and state.get("failed")
        }
        lines = [
            {
                "component": "virt-launcher",
                "level": "error",
                "msg": "Live migration failed.",
                "reason": state.get("failureReason", ""),
                "timestamp": state.get("endTimestamp"),
            }
            for state in sorted(states.values(), key=lambda state: state["endTimestamp"])
        ]
        return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)

    def _list_pods(self, selector: str) -> Object:
        """The pods of a node, for `kubectl describe node` and `kubectl drain`."""
        terms = (term.replace("==", "=").split("=", 1) for term in selector.split(","))
        wanted = {name: value for name, value in terms if not name.endswith("!")}
        pods = [decode(entry) for entry in self.store.caches[PODS].all()]
        found = [pod for pod in pods if objects.node_of(pod) == wanted["spec.nodeName"]]
        unfinished = [pod for pod in found if not objects.is_final(pod)]
        shown = unfinished if "status.phase!=" in selector else found
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": shown}


_VERSION = {"groupVersion": "kubevirt.io/v1", "version": "v1"}
_KUBEVIRT = {"name": "kubevirt.io", "versions": [_VERSION], "preferredVersion": _VERSION}


def _discover(path: list[str]) -> object:
    match path:
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_KUBEVIRT]}
        case ["api", "v1"]:
            return _list_resources("")
        case ["apis", "kubevirt.io", "v1"]:
            return _list_resources("kubevirt.io")
        case _:
            return None


def _list_resources(group: str) -> Object:
    resources = [one for one in (*RESOURCES, EVENTS) if one.group == group]
    listed: list[Object] = [
        {
            "name": one.plural,
            "singularName": one.kind.lower(),
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": VERBS,
            "shortNames": SHORT_NAMES.get(one.kind, []),
        }
        for one in resources
    ]
    if not group:
        eviction = {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ["create"]}
        listed.append({"name": "pods/eviction", "singularName": "", "namespaced": True} | eviction)
        listed.append(
            {"name": "pods/log", "singularName": "", "namespaced": True, "kind": "Pod"}
            | {"verbs": ["get"]}
        )
    version = f"{group}/v1" if group else "v1"
    kind = {"kind": "APIResourceList", "apiVersion": "v1"}
    return kind | {"groupVersion": version, "resources": listed}
