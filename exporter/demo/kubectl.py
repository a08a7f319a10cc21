"""The simulated API server for people with kubectl: discovery, evictions, cancelling, logs, events.

With it, the commands of the runbooks can be tried on the demo, except those that are marked as for
a real cluster. The paths and answers are those of kube-apiserver and virt-api
(`evacuate_cancel.go`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

import msgspec
from aiohttp import web

from exporter.demo import exporter_pod, objects, status, webhooks
from exporter.demo.apiserver import SimulatedApiServer, respond_error, respond_json
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.requests import is_true
from exporter.demo.status import ApiResource, StatusError
from exporter.demo.store import (
    EVICTION_REQUESTS,
    EVICTIONS,
    MIGRATIONS,
    NODES,
    PODS,
    RESOURCES,
    VMIS,
)


VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
EVENTS = ApiResource("", "v1", "events", "Event")
QUOTAS = ApiResource("", "v1", "resourcequotas", "ResourceQuota")
SHORT_NAMES = {"VirtualMachineInstance": ["vmi"], "VirtualMachineInstanceMigration": ["vmim"]}
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
INTERCEPTOR = "virt-launcher-eviction-interceptor.kubevirt.io"


class DemoApiServer(SimulatedApiServer):
    """Serves a cluster's store, and the other endpoints that kubectl and the runbooks need.

    `find_exporter` returns the URL of the exporter that the commands in its pod ask.
    """

    def __init__(self, cluster: Cluster, find_exporter: Callable[[], str] = str) -> None:
        super().__init__(cluster.store)
        self._cluster = cluster
        self._find_exporter = find_exporter

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        if http.path.endswith(f"/pods/{exporter_pod.NAME}/exec"):
            return await exporter_pod.execute(http, self._find_exporter())
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
            case "POST", ["apis", _, "v1", "namespaces", namespace, MIGRATIONS.plural]:
                asked = await http.json()
                asked["metadata"]["namespace"] = namespace
                return self.store.create(MIGRATIONS, webhooks.admit_migration(asked))
            case "PUT", ["apis", _, "v1", _, namespace, _, name, "evacuate", "cancel"]:
                answer = self._cancel(namespace, name, await http.json())
            case _:
                pass
        return answer

    def _read(self, http: web.Request, path: list[str]) -> object:
        match path:
            case ["api", "v1", *_, EVENTS.plural | QUOTAS.plural as plural]:
                kind = EVENTS.kind if plural == EVENTS.plural else QUOTAS.kind
                return objects.build_list(kind, [])
            case ["apis", EVICTIONS.group, _, *within, EVICTIONS.plural] if is_table(http):
                namespace = within[1] if within else None
                return build_table(self.store.objects(EVICTIONS, namespace), self.store.clock())
            case ["api", "v1", *within, "pods"] if exporter_pod.LABEL in http.query_string:
                return exporter_pod.find_pods(within[1] if within else None)
            case ["api", "v1", "namespaces", exporter_pod.NAMESPACE, "pods", exporter_pod.NAME]:
                return exporter_pod.POD
            case ["api", "v1", "namespaces", _, "pods", exporter_pod.NAME, "log"]:
                raise web.HTTPOk(text=exporter_pod.LOG)
            case ["api", "v1", *_, "pods"] if "spec.nodeName" in http.query_string:
                return self._list_pods(
                    http.query["fieldSelector"], http.query.get("labelSelector", "")
                )
            case ["api", "v1", _, namespace, "pods", name, "log"]:
                raise web.HTTPOk(text=self._read_log(namespace, name))
            case _:
                return None

    def _evict(self, namespace: str, name: str) -> Object:
        """Evict a pod, and answer like kube-apiserver with KubeVirt's validating webhook."""
        answer = self._cluster.evict(namespace, name)
        if answer.code == 200:
            return status.success()
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
        return status.success()

    def _read_log(self, namespace: str, name: str) -> str:
        """The launcher's log lines about the known failed migrations that started from it."""
        pod = self.store.get(PODS, namespace, name)
        vmi = self.store.find(VMIS, *objects.owner_key(pod).split("/")) or {}
        states = {
            state["migrationUid"]: state
            for state in map(objects.state_of, [*self.store.objects(MIGRATIONS), vmi])
            if state.get("sourcePod") == name and state.get("failed")
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

    def _list_pods(self, selector: str, label: str) -> Object:
        """The pods of a node, for `kubectl describe node` and `kubectl drain`.

        `label` is one label that they must have, as KEY=VALUE; "" for all.
        """
        terms = (term.replace("==", "=").split("=", 1) for term in selector.split(","))
        wanted = {name: value for name, value in terms if not name.endswith("!")}
        key, _, value = label.partition("=")
        pods = [
            pod
            for pod in self.store.objects(PODS)
            if objects.node_of(pod) == wanted["spec.nodeName"]
            and (not label or objects.labels(pod).get(key) == value)
        ]
        unfinished = [pod for pod in pods if not objects.is_final(pod)]
        shown = unfinished if "status.phase!=" in selector else pods
        return objects.build_list("Pod", shown)


_VALIDATED = (MIGRATIONS, EVICTION_REQUESTS)
"""What `kubectl create` makes; it asks whether the server validates it."""
_GROUPS = {f"apis/{resource.api_version}": resource for resource in _VALIDATED}


def _describe_group(resource: ApiResource) -> Object:
    version = {"groupVersion": resource.api_version, "version": resource.version}
    return {"name": resource.group, "versions": [version], "preferredVersion": version}


def _describe_validation(resource: ApiResource) -> Object:
    group, path = resource.group, f"/apis/{resource.api_version}/namespaces/{{namespace}}"
    patch = {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "x-kubernetes-group-version-kind": {
            "group": group,
            "version": resource.version,
            "kind": resource.kind,
        },
    }
    return {f"{path}/{resource.plural}/{{name}}": {"patch": patch}}


def is_table(http: web.Request) -> bool:
    """Whether kubectl asks for the columns that it prints."""
    return "as=Table" in http.headers.get("Accept", "") and not is_true(http.query.get("watch"))


def build_table(evictions: Iterable[Object], now: datetime) -> Object:
    """The most important columns of Evictions, as Kubernetes 1.38 prints them."""
    rows = []
    for eviction in evictions:
        state = eviction["status"]
        reasons = {
            condition["type"]: f"{condition['type']} ({condition['reason']})"
            for condition in state["conditions"]
            if condition["status"] == "True"
        }
        turns = state["targetResponders"]
        active = [number for number, turn in enumerate(turns, 1) if turn["state"] == "Active"]
        name = turns[active[0] - 1]["name"] if active else ""
        entry: Object = next((row for row in state["responders"] if row["name"] == name), {})
        end = entry.get("expectedCompletionTime")
        left = (datetime.fromisoformat(end) - now).total_seconds() if end else 0
        cells = [
            eviction["metadata"]["name"],
            reasons.get("TargetEvicted") or reasons.get("Failed") or "Progressing",
            f"{name} ({active[0]}/{len(turns)})" if active else "",
            f"in {left:.0f}s" if left > 0 else "",
            ", ".join(row["name"] for row in state["requesters"] if row["intent"] == "Eviction"),
            entry.get("message", ""),
        ]
        described = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
        described |= {"metadata": eviction["metadata"]}
        rows.append({"cells": cells, "object": described})
    columns = [
        {"name": name, "type": "string", "priority": int(name == "Responder Status Message")}
        for name in (
            "Name",
            "Status",
            "Active Responder",
            "Responder Expected Finish",
            "Requesters",
            "Responder Status Message",
        )
    ]
    kind = {"kind": "Table", "apiVersion": "meta.k8s.io/v1"}
    return kind | {"metadata": {}, "columnDefinitions": columns, "rows": rows}


def _discover(path: list[str]) -> object:
    document: object = None
    match path:
        case ["api"]:
            document = {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = [_describe_group(resource) for resource in _VALIDATED]
            document = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["api", "v1"]:
            document = _list_resources("")
        case ["apis", _, _] if "/".join(path) in _GROUPS:
            document = _list_resources(path[1], path[2])
        case ["openapi", "v3"]:
            places = {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in _GROUPS}
            document = {"paths": places}
        case ["openapi", "v3", *place] if "/".join(place) in _GROUPS:
            paths = _describe_validation(_GROUPS["/".join(place)])
            document = {"openapi": "3.0.0", "paths": paths}
        case _:
            pass
    return document


def _list_resources(group: str, version: str = "v1") -> Object:
    resources = [resource for resource in (*RESOURCES, EVENTS, QUOTAS) if resource.group == group]
    listed: list[Object] = [
        {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": VERBS,
            "shortNames": SHORT_NAMES.get(resource.kind, []),
        }
        for resource in resources
    ]
    if not group:
        eviction = {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ["create"]}
        listed.append({"name": "pods/eviction", "singularName": "", "namespaced": True} | eviction)
        listed.append(
            {"name": "pods/log", "singularName": "", "namespaced": True, "kind": "Pod"}
            | {"verbs": ["get"]}
        )
    kind = {"kind": "APIResourceList", "apiVersion": "v1"}
    place = f"{group}/{version}" if group else version
    return kind | {"groupVersion": place, "resources": listed}
