"""Every way to install the exporter, by the commands of docs/install.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import ONLY_FULL, Cluster, wait_for
from tests.e2e.documents import CERTIFICATE, SECTIONS, WAYS, commands, type_section
from tests.generate.manifests import NAME, NAMESPACE, TLS_SECRET


UNINSTALL = "Uninstall"


@pytest.fixture(scope="module", autouse=True)
def certified(cluster: Cluster, scratch: Path) -> Iterator[None]:
    """The certificate from openssl, and a running descheduler that the sidecar replaces."""
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
    cluster.run_pause("kube-system", "descheduler")
    yield
    cluster.kubectl("-n", "kube-system", "delete", "deployment", "descheduler")
    cluster.remove()


@pytest.mark.parametrize(
    "way",
    # Another test compares the objects of Helm and kustomize, so one way by Helm is enough here.
    [
        pytest.param(way, marks=ONLY_FULL if "Helm" in way and "Sidecar" not in way else ())
        for way in WAYS
    ],
)
def test_it_gets_ready_and_answers(cluster: Cluster, scratch: Path, way: str) -> None:
    """The documented commands install an exporter that gets Ready and answers, and uninstall it."""
    with cluster.terminal(scratch) as terminal:
        *_, output = type_section(terminal, way).values()
        print(cluster.kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide"))
        print(output)
        assert "Healthy" in output
        assert "shop/db1" in output
        assert all(container["ready"] for pod in cluster.pods() for container in containers(pod))
        if not way.startswith(("Standalone", "Webhook")):
            printed = type_section(terminal, "Check that it works")
            assert "Healthy" in [*printed.values()][-1]
            assert any("db1" in output for output in printed.values())
        uninstall(cluster, scratch, by_helm=way.endswith("by Helm"))


def containers(pod: dict[str, dict[str, list[dict[str, bool]]]]) -> list[dict[str, bool]]:
    """The state of every container of a pod, sidecars included."""
    status = pod["status"]
    return [*status["containerStatuses"], *status.get("initContainerStatuses", [])]


def uninstall(cluster: Cluster, scratch: Path, *, by_helm: bool) -> None:
    """Run the commands to uninstall; check that only the documented objects are left."""
    with cluster.terminal(scratch) as terminal:
        for command in commands_of_uninstall(by_helm=by_helm):
            terminal.type(command)
    selector = f"app.kubernetes.io/name={NAME}"
    kinds = "clusterrole,clusterrolebinding,mutatingwebhookconfiguration"
    assert not cluster.get(kinds, "-l", selector)["items"]
    wait_for(lambda: not cluster.get("-n", NAMESPACE, "pods")["items"], "pods gone")
    left = cluster.get("-n", NAMESPACE, "all,configmap,secret,serviceaccount,role,rolebinding")
    names = {(document["kind"], document["metadata"]["name"]) for document in left["items"]}
    assert {name for kind, name in names if kind == "Secret"} == {TLS_SECRET}
    assert {kind for kind, _ in names} <= {"ConfigMap", "Secret", "ServiceAccount"}


def commands_of_uninstall(*, by_helm: bool) -> list[str]:
    """The command for Helm, or those for kustomize, without the one that deletes the namespace."""
    listed = commands(SECTIONS[UNINSTALL])
    helm = [command for command in listed if command.startswith("helm ")]
    everything = [command for command in listed if "delete namespace" in command]
    assert len(helm) == len(everything) == 1
    return helm if by_helm else [command for command in listed if command not in helm + everything]
