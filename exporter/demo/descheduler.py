"""A simulated descheduler that evicts VMs from overloaded nodes if the exporter allows it.

A cycle works like LowNodeUtilization: it requests `filter` verdicts for all pods of an overloaded
node, and a `preEviction` verdict just before each eviction. A stock descheduler requests none; its
evictions go through the admission webhook, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import aiohttp
import msgspec
import structlog

from exporter.demo import objects
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.scenario import Scenario, Vm, node_loads


CYCLE_SECONDS = 5.0
ANSWER_SECONDS = 2.0
"""The timeout of a request for verdicts. A request that times out ends the cycle."""
OVERLOADED = 1.1
"""A node above this multiple of the mean load is overloaded."""
EVICTIONS_PER_NODE = 2
USER = "system:serviceaccount:kube-system:descheduler-sa"
"""The user that requests evictions: the service account of the descheduler's own manifests."""
WEBHOOK_SECONDS = 1.0

Checkpoint = Literal["filter", "preEviction"]
log = structlog.get_logger()


class _Verdict(msgspec.Struct):
    allowed: bool


class _Answer(msgspec.Struct):
    verdicts: list[_Verdict]


class _Status(msgspec.Struct):
    message: str


class _Response(msgspec.Struct):
    allowed: bool
    status: _Status | None = None


class _Review(msgspec.Struct):
    response: _Response


class Descheduler:
    """Evicts pods of overloaded nodes if the exporter at `query_url` allows it.

    `query_url` None: a stock descheduler, which requests no verdicts. `webhook_url`: the admission
    webhook that the API server calls for each eviction.
    """

    def __init__(
        self,
        cluster: Cluster,
        scenario: Scenario,
        query_url: str | None,
        start: datetime,
        *,
        webhook_url: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._scenario = scenario
        self._url = None if query_url is None else f"{query_url.rstrip('/')}/v1/verdicts"
        self._webhook = None if webhook_url is None else f"{webhook_url.rstrip('/')}/v1/evictions"
        self._start = start
        self._is_answered = True
        self._denied: set[str] = set()

    async def cycle(self, session: aiohttp.ClientSession, now: datetime) -> int:
        """Go through the overloaded nodes once; returns the number of evicted pods.

        Without an answer it evicts nothing; the next cycle tries again.
        """
        evicted = 0
        try:
            for node in self.overloaded(now):
                evicted += await self._relieve(session, node, now)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            if self._is_answered:
                log.warning("verdicts_unavailable", error=str(error) or type(error).__name__)
            self._is_answered = False
        return evicted

    def overloaded(self, now: datetime) -> list[str]:
        """The overloaded nodes, the fullest first."""
        loads = node_loads(self._scenario, self._cluster, self._start, now)
        threshold = OVERLOADED * sum(loads.values()) / max(len(loads), 1)
        above = [node for node, load in loads.items() if load > threshold]
        return sorted(above, key=lambda node: loads[node], reverse=True)

    def candidates(self, node: str, now: datetime) -> list[Object]:
        """The launcher pods of a node that a descheduler may select, the heaviest first."""
        seconds = (now - self._start).total_seconds() * self._cluster.pace.speed

        def load(vm: Vm) -> float:
            return self._scenario.load(vm, seconds)

        pods = []
        for vm in sorted(self._scenario.vms, key=load, reverse=True):
            pod = self._cluster.launcher(vm.namespace, vm.name)
            if pod is None or objects.node_of(pod) != node or not objects.is_pod_ready(pod):
                continue
            notes = objects.annotations(pod)
            # Pods that are being evicted are not selected again.
            if objects.EVICTION_IN_PROGRESS in notes or objects.PREFER_NO_EVICTION in notes:
                continue
            pods.append(pod)
        return pods

    async def _relieve(self, session: aiohttp.ClientSession, node: str, now: datetime) -> int:
        pods = self.candidates(node, now)
        if not pods:
            return 0
        allowed = await self._ask(session, "filter", pods)
        evicted = 0
        for pod, may_be_candidate in zip(pods, allowed, strict=True):
            if evicted == EVICTIONS_PER_NODE:
                break
            if (
                may_be_candidate
                and all(await self._ask(session, "preEviction", [pod]))
                and await self._is_admitted(session, pod)
            ):
                evicted += self._evict(pod)
        return evicted

    async def _ask(
        self, session: aiohttp.ClientSession, checkpoint: Checkpoint, pods: Sequence[Object]
    ) -> list[bool]:
        if self._url is None:
            return [True] * len(pods)
        body = {
            "checkpoint": checkpoint,
            "candidates": [
                {
                    "namespace": pod["metadata"]["namespace"],
                    "name": objects.annotations(pod)[objects.DOMAIN],
                    "vmiUid": objects.labels(pod)[objects.CREATED_BY],
                    "node": objects.node_of(pod),
                    "pod": pod["metadata"]["name"],
                }
                for pod in pods
            ],
        }
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with session.post(self._url, json=body, timeout=timeout) as response:
            response.raise_for_status()
            answer = msgspec.json.decode(await response.read(), type=_Answer)
        if len(answer.verdicts) != len(pods):
            raise msgspec.DecodeError(f"{len(answer.verdicts)} verdicts for {len(pods)} pods")
        if not self._is_answered:
            log.info("verdicts_available")
        self._is_answered = True
        return [verdict.allowed for verdict in answer.verdicts]

    async def _is_admitted(self, session: aiohttp.ClientSession, pod: Object) -> bool:
        """Whether the API server, which asks the webhook, admits an eviction.

        Without an answer it admits the eviction. A denial is logged as a warning, once for each VM.
        """
        if self._webhook is None:
            return True
        vm = f"{pod['metadata']['namespace']}/{objects.annotations(pod)[objects.DOMAIN]}"
        timeout = aiohttp.ClientTimeout(total=WEBHOOK_SECONDS)
        try:
            async with session.post(self._webhook, json=_review(pod), timeout=timeout) as response:
                response.raise_for_status()
                answer = msgspec.json.decode(await response.read(), type=_Review).response
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("webhook_failed_open", error=str(error) or type(error).__name__)
            return True
        if answer.allowed:
            self._denied.discard(vm)
            return True
        if vm not in self._denied:
            self._denied.add(vm)
            message = "" if answer.status is None else answer.status.message
            log.warning(
                "eviction_failed",
                pod=pod["metadata"]["name"],
                error=f"denied by the webhook: {message}",
            )
        return False

    def _evict(self, pod: Object) -> bool:
        """Evict a pod; 429 with this message means "evicted in the background"."""
        answer = self._cluster.evict(
            pod["metadata"]["namespace"], pod["metadata"]["name"], descheduler=True
        )
        return answer.code == 200 or "Eviction triggered evacuation" in answer.message


def _review(pod: Object) -> Object:
    """The relevant fields of the API server's request to a webhook on `pods/eviction`."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": f"{namespace}-{name}",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": "eviction",
            "operation": "CREATE",
            "namespace": namespace,
            "name": name,
            "userInfo": {"username": USER, "groups": ["system:authenticated"]},
            "object": {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"namespace": namespace, "name": name},
            },
            "dryRun": False,
        },
    }
