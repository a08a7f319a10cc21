"""The real descheduler under the rendered roles, with the rendered flags and policy."""

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.cluster import PODS, VMIS, RealCluster, find_binary, launcher_pod, poll, vmi
from tests.cluster.objects import Object
from tests.cluster.ports import free_port
from tests.cluster.processes import Process
from tests.cluster.resources import NODES, Resource
from tests.generate.manifests import NAME, NAMESPACE, containers, only, render
from tests.integration.deploy.secured import installed, somebody
from tests.integration.deploy.server import account, applied
from tests.integration.deploy.test_install import OWN_CALLER, fenced
from tests.support.admission import Pair


EVICTED = "Evicted pod"
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")


def arguments(kubeconfig: Path, directory: Path, plugin: Object | None = None) -> list[str]:
    """The container's flags, with another policy file and port.

    `plugin` replaces the policy's configuration of KubeVirtVerdicts.
    """
    objects = render("overlays/sidecar")
    container = containers(only(objects, "Deployment")["spec"]["template"])["descheduler"]
    policy = directory / "policy.yaml"
    text = only(objects, "ConfigMap", f"{NAME}-descheduler")["data"]["policy.yaml"]
    if plugin is not None:
        changed = yaml.safe_load(text)
        (profile,) = changed["profiles"]
        others = [entry for entry in profile["pluginConfig"] if entry["name"] != plugin["name"]]
        assert len(others) == len(profile["pluginConfig"]) - 1
        profile["pluginConfig"] = [*others, plugin]
        text = yaml.safe_dump(changed)
    policy.write_text(text)
    places = {"/policy-dir/policy.yaml": str(policy), "$(POD_NAMESPACE)": NAMESPACE}
    flags = [
        re.sub("|".join(map(re.escape, places)), lambda match: places[match[0]], argument)
        for argument in container["args"]
    ]
    return [
        str(find_binary("descheduler")),
        *flags,
        f"--kubeconfig={kubeconfig}",
        f"--secure-port={free_port()}",
        "--bind-address=127.0.0.1",
    ]


def node(name: str) -> Object:
    """A ready node for VMs, with four CPUs."""
    room = {"cpu": "4", "memory": "8Gi", "pods": "100"}
    return {
        "metadata": {"name": name, "labels": {"kubevirt.io/schedulable": "true"}},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.fixture
async def crowded(cluster: RealCluster) -> AsyncIterator[RealCluster]:
    """A node with three launcher pods that request one CPU each, and an empty node."""
    names = ("a", "b", "c")
    request = {"requests": {"cpu": "1", "memory": "1Gi"}}
    compute = {"name": "compute", "image": "virt-launcher", "resources": request}
    for name in ("n1", "n2"):
        await cluster.admin.create(NODES, node(name))
        # Every new node has the taint not-ready, which only a controller removes.
        await cluster.admin.merge(NODES, None, name, {"spec": {"taints": None}})
    for name in names:
        made = await cluster.admin.create(VMIS, vmi(name))
        pod = launcher_pod(made, metadata={"name": name}, spec={"containers": [compute]})
        await cluster.admin.create(PODS, pod)
    yield cluster
    for name in names:
        await cluster.admin.delete(VMIS, "default", name)
    for path in (EVENTS.path("default"), PODS.path("default"), NODES.path()):
        await cluster.admin.send("DELETE", path, json={"gracePeriodSeconds": 0})


async def run(
    cluster: RealCluster, command: list[str], directory: Path, refusals: Sequence[str] = ()
) -> str:
    """Run the descheduler until it evicts a pod with an Event, or is refused; returns its log."""
    process = Process(command, directory / "descheduler.log")
    process.start()

    async def is_done() -> bool:
        assert process.running, process.tail()
        output = process.log.read_text()
        if refusals:
            return all(refusal in output for refusal in refusals)
        events = await cluster.admin.list(EVENTS, "default")
        return (EVICTED in output and bool(events["items"])) or "forbidden" in output

    try:
        await poll(is_done, what="an eviction and its event")
    finally:
        process.kill()
        # Now the next descheduler need not wait for the Lease.
        await cluster.admin.send("DELETE", LEASES.path(NAMESPACE))
    return process.log.read_text()


async def test_a_cycle_under_the_rendered_roles(crowded: RealCluster, tmp_path: Path) -> None:
    """The descheduler reads what it needs, evicts a pod, writes an Event, and gets no 403."""
    async with account(crowded, "overlays/sidecar") as user:
        output = await run(crowded, arguments(crowded.kubeconfig(user), tmp_path), tmp_path)

    assert EVICTED in output
    assert "forbidden" not in output
    pods = (await crowded.admin.list(PODS, "default"))["items"]
    assert any("deletionTimestamp" in pod["metadata"] for pod in pods)


@pytest.mark.parametrize(
    ("verb", "resources"),
    [
        ("watch", ("nodes", "pods", "persistentvolumeclaims")),
        ("create", ("pods/eviction",)),
        ("create", ("events",)),
        ("create", ("leases",)),
        ("get", ("leases",)),
    ],
)
async def test_what_a_cycle_needs(
    crowded: RealCluster, verb: str, resources: tuple[str, ...], tmp_path: Path
) -> None:
    """If permissions are missing, the descheduler's log has a 403 for each."""
    refusals = [f'cannot {verb} resource \\"{resource}\\"' for resource in resources]
    async with account(crowded, "overlays/sidecar", without=(verb, resources)) as user:
        await run(crowded, arguments(crowded.kubeconfig(user), tmp_path), tmp_path, refusals)


def as_a_caller() -> tuple[Object, Object]:
    """The example of a descheduler in its own pod: the plugin's policy, and the pod."""
    policy, pod = (yaml.safe_load(text) for text in fenced(OWN_CALLER, "yaml"))
    return policy[0], pod


def test_the_files_of_a_pod_of_its_own_are_mounted() -> None:
    """The plugin's paths are those of the token and the CA in the projected volume."""
    plugin, pod = as_a_caller()
    (mount,) = pod["containers"][0]["volumeMounts"]
    (volume,) = pod["volumes"]
    token, authority = volume["projected"]["sources"]
    place = Path(mount["mountPath"])

    assert mount["name"] == volume["name"]
    assert plugin["args"]["bearerTokenFile"] == str(place / token["serviceAccountToken"]["path"])
    assert plugin["args"]["tlsConfig"] == {"caCertFile": str(place / "ca.crt")}
    assert authority["configMap"]["name"] == f"{NAME}-ca"
    assert plugin["args"]["urlPrefix"] == f"https://{NAME}.{NAMESPACE}.svc:9810"


async def test_a_descheduler_in_a_pod_of_its_own_asks_over_tls(
    crowded: RealCluster, pair: Pair, tmp_path: Path
) -> None:
    """With the example's arguments the descheduler sends its token, and evicts allowed VMs."""
    plugin, _ = as_a_caller()
    async with (
        somebody(crowded, "descheduler", f"{NAME}-descheduler", f"{NAME}-caller") as token,
        somebody(crowded, "scraper", f"{NAME}-scraper") as scraper,
        installed(crowded, tmp_path, pair) as nobody,
    ):
        prometheus = nobody.with_token(scraper)
        (tmp_path / "token").write_text(token)
        plugin["args"] |= {
            "urlPrefix": nobody.exporter.query,
            "tlsConfig": {"caCertFile": str(pair.authority)},
            "bearerTokenFile": str(tmp_path / "token"),
            "ignorable": False,
        }
        roles = [row for row in render("overlays/sidecar") if row["kind"] == "ClusterRole"]
        async with applied(
            crowded.admin, [only(tuple(roles), "ClusterRole", f"{NAME}-descheduler")]
        ):
            account_of_it = await crowded.account(NAMESPACE, "descheduler")
            kubeconfig = crowded.kubeconfig(account_of_it)
            command = arguments(kubeconfig, tmp_path, plugin)
            alone = [argument for argument in command if "leader-elect" not in argument]
            output = await run(crowded, alone, tmp_path)
        answered = await prometheus.sample(
            "kubevirt_eviction_exporter_request_duration_seconds_count", endpoint="verdicts"
        )
        refusals = "kubevirt_eviction_exporter_rejected_requests_total"
        refused = [await prometheus.sample(refusals, status=status) for status in ("401", "403")]

    assert EVICTED in output
    assert "forbidden" not in output
    assert answered > 0
    assert refused == [0, 0]
    assert token not in output
