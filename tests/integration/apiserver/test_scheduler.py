"""The forecast that no other node can take a VM, and what the real kube-scheduler does.

Each VM has some nodes of its own, with random taints and labels, and random rules: tolerations, a
node selector and a required affinity. First the exporter is asked, then the scheduler gets a target
pod as KubeVirt makes it. All nodes are Ready: on a node that is not, no migration would succeed,
even if the pod tolerates everything.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from exporter.demo.objects import build_node, condition
from exporter.engine.evacuations.outlook import NO_OTHER_NODE
from exporter.engine.facts.placement import BY_DEFAULT, HOSTNAME, UNSCHEDULABLE
from exporter.kube.objects.places import SCHEDULABLE
from tests.cluster import PODS, VMIS, RealCluster, launcher_pod, poll, vmi
from tests.cluster.objects import Object, overlay
from tests.cluster.resources import NODES
from tests.cluster.servers import Scheduler
from tests.support.program import Program, program


# Else new nodes are tainted until a controller, which does not run here, finds them Ready.
FLAGS = ("--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",)
AT_A_TIME = 20
OWNER = "owner"
"""The label of a VM's own nodes."""
ROOM = {"cpu": "8", "memory": "32Gi", "pods": "110"}
KEYS = ("dedicated", "gpu", *sorted(BY_DEFAULT))
EFFECTS = ("NoSchedule", "NoExecute", "PreferNoSchedule")
VALUES = ("", "a", "b")
LABELS = {"zone": ("a", "b"), "rack": ("1", "2"), "cpus": ("8", "16", "32", "many")}


class Lottery(Random):
    """Draws nodes and VMs that the API server accepts."""

    def happens(self, chance: float) -> bool:
        """True with this probability."""
        return self.random() < chance

    def draw_nodes(self, owner: str) -> list[Object]:
        """The nodes of one VM; the first is the one that it runs on."""
        return [self._draw_node(owner, number) for number in range(self.randint(1, 5))]

    def draw_vmi(self, owner: str, nodes: list[Object]) -> Object:
        """A VM with rules about its node."""
        names = [node["metadata"]["name"] for node in nodes]
        tolerations = [self._draw_toleration() for _ in range(self.randint(0, 3))]
        spec: Object = {"tolerations": tolerations, "nodeSelector": {OWNER: owner}}
        if self.happens(0.5):
            terms = [self._draw_term(names) for _ in range(self.randint(1, 2))]
            required = {"nodeSelectorTerms": terms}
            rule = {"requiredDuringSchedulingIgnoredDuringExecution": required}
            spec["affinity"] = {"nodeAffinity": rule}
        if self.happens(0.3):
            key = self.choice((HOSTNAME, *LABELS))
            spec["nodeSelector"][key] = self.choice(LABELS.get(key, names))
        return vmi(owner, node=names[0], spec=spec)

    def _draw_node(self, owner: str, number: int) -> Object:
        labels = {key: self.choice(values) for key, values in LABELS.items() if self.happens(0.7)}
        labels |= {OWNER: owner, SCHEDULABLE: "false" if self.happens(0.1) else "true"}
        taints = {(self.choice(KEYS), self.choice(EFFECTS)) for _ in range(self.randint(0, 1))}
        spec = {
            "unschedulable": self.happens(0.15),
            "taints": [
                {"key": key, "effect": effect, "value": self.choice(VALUES)}
                for key, effect in sorted(taints)
            ],
        }
        ready = {"type": "Ready", "status": "True"}
        status = {"allocatable": ROOM, "capacity": ROOM, "conditions": [ready]}
        changes = {"metadata": {"labels": labels}, "spec": spec, "status": status}
        return overlay(build_node(f"{owner}-{number}"), changes)

    def _draw_toleration(self) -> Object:
        key = self.choice(("", UNSCHEDULABLE, *KEYS))
        toleration = {"key": key, "effect": self.choice(("", "", *EFFECTS))}
        if not key or self.happens(0.5):
            return toleration | {"operator": "Exists"}
        return toleration | {"operator": "Equal", "value": self.choice(VALUES)}

    def _draw_term(self, names: list[str]) -> Object:
        expressions = [self._draw_expression() for _ in range(self.randint(0, 2))]
        term: Object = {"matchExpressions": expressions}
        if self.happens(0.3):
            term["matchFields"] = [
                {
                    "key": "metadata.name",
                    "operator": self.choice(("In", "NotIn")),
                    "values": [self.choice(names)],
                }
            ]
        return term

    def _draw_expression(self) -> Object:
        key = self.choice((*LABELS, "missing"))
        operator = self.choice(("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"))
        requirement: Object = {"key": key, "operator": operator}
        if operator in ("In", "NotIn"):
            choices = LABELS.get(key, VALUES)
            return requirement | {"values": self.sample(choices, self.randint(1, 2))}
        return (
            requirement | {"values": [self.choice(("1", "12", "30"))]}
            if operator[1] == "t"
            else requirement
        )


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(75, 100, id="small"),
        pytest.param(76, 500, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
async def test_the_forecast_agrees_with_the_scheduler(
    seed: int, count: int, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """The VMs that no other node can take are exactly those for which the scheduler has no node."""
    lottery = Lottery(seed)
    async with RealCluster(tmp_path / "cluster", flags=FLAGS) as cluster:
        owners = [f"vm-{number}" for number in range(count)]
        nodes = {owner: lottery.draw_nodes(owner) for owner in owners}
        vmis = [lottery.draw_vmi(owner, nodes[owner]) for owner in owners]
        for group in nodes.values():
            await asyncio.gather(
                *(cluster.admin.request("POST", NODES.path(), json=node) for node in group)
            )
        made = await map_all(vmis, lambda vmi: cluster.admin.create(VMIS, vmi))
        await map_all(made, lambda vmi: cluster.admin.create(PODS, launcher_pod(vmi)))
        login = cluster.kubeconfig(cluster.exporter)
        async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
            await exporter.ready()
            await exporter.until("/v1/status", has_listed_nodes)
            forecasts = await map_all(owners, lambda owner: find_forecast(exporter, owner))
        targets = await map_all(made, lambda vmi: cluster.admin.create(PODS, build_target(vmi)))
        scheduler = cluster.kubeconfig(cluster.certified("system:kube-scheduler"))
        async with Scheduler(cluster.directory, scheduler):
            decisions = await map_all(targets, lambda pod: find_decision(cluster, pod))
    pairs = Counter(zip(forecasts, decisions, strict=True))
    both, none = pairs["leaves", "True"], pairs[NO_OTHER_NODE, "False"]
    prove(
        f"scheduler: {count} random sets of taints, tolerations, selectors and affinities: {none}"
        f" without another node, {both} with one, for forecast and scheduler alike; no node, but"
        f" scheduled: {pairs[NO_OTHER_NODE, 'True']}; a node, but not scheduled:"
        f" {pairs['leaves', 'False']}"
    )
    wrong = [
        (forecast, decision, vmi["spec"], nodes[vmi["metadata"]["name"]])
        for forecast, decision, vmi in zip(forecasts, decisions, made, strict=True)
        if (forecast, decision) not in (("leaves", "True"), (NO_OTHER_NODE, "False"))
    ]
    assert not wrong
    assert min(both, none) > count // 5, "the sets are of both kinds"


def has_listed_nodes(_status: int, body: Any) -> bool:
    """Whether the exporter knows the nodes, without which it is ready too."""
    return any(row["resource"] == "nodes" and row["synced"] for row in body["resources"])


async def map_all(values: Iterable[Any], act: Callable[[Any], Any]) -> list[Any]:
    """The results of an action for each value, some at a time."""
    slots = asyncio.Semaphore(AT_A_TIME)

    async def act_in_turn(value: Any) -> Any:
        async with slots:
            return await act(value)

    return await asyncio.gather(*map(act_in_turn, values))


async def find_forecast(exporter: Program, name: str) -> str:
    """The outcome of a drain for a VM, or the reason word if it fails."""
    _, body = await exporter.get(f"/v1/vmis/default/{name}")
    if body["drain"] != "fails":
        return str(body["drain"])
    return str(body["obstruction"]["cause"]["reason"])


def build_target(made: Object) -> Object:
    """The target pod of a VM: its rules, those of KubeVirt, and not on the node of the VM."""
    pod = launcher_pod(made)
    labels = {"kubevirt.io/created-by": made["metadata"]["uid"]}
    rule = {"labelSelector": {"matchLabels": labels}, "topologyKey": HOSTNAME}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}
    spec = made["spec"]
    return {
        **pod,
        "spec": {
            "containers": pod["spec"]["containers"],
            "tolerations": spec["tolerations"],
            "nodeSelector": spec["nodeSelector"] | {SCHEDULABLE: "true"},
            "affinity": spec.get("affinity", {}) | apart,
        },
        "status": {},
    }


async def find_decision(cluster: RealCluster, pod: Object) -> str:
    """The status of the condition PodScheduled, once the scheduler has written it."""
    metadata = pod["metadata"]

    async def find() -> str:
        seen = await cluster.admin.get(PODS, metadata["namespace"], metadata["name"])
        return str((condition(seen, "PodScheduled") or {}).get("status", ""))

    return await poll(find, what=f"the scheduler's decision about {metadata['name']}")
