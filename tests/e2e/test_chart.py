"""The chart with the values of a site, and `kubectl evictions` by users with and without its role.

The image is named by its digest. The pods have a priority class, an affinity and more labels, and
the exporter watches two namespaces.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from tests.cluster import namespace, vmi
from tests.cluster.users import User, kubeconfig
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.documents import CERTIFICATE, SECTIONS, commands, type_section
from tests.e2e.images import EXPORTER
from tests.e2e.node import SERVER
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAME, NAMESPACE
from tests.integration.deploy.test_chart import site_values
from tests.support.documents import code_blocks
from tests.support.kubectl_plugin import write_plugin


DESK = "helpdesk"
"""The namespace of the users' accounts."""
OWN_MACHINE = "From your own machine"
CHART = f"deploy/helm/{NAME}"


@pytest.fixture(scope="module")
def digest(cluster: Cluster) -> str:
    """The digest of the exporter's image, by which the node then knows it."""
    containerd = ("ctr", "-n", "k8s.io", "images")
    listing = cluster.node.command(*containerd, "list", f"name=={EXPORTER.name}")
    listed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    _, _, digest, *_ = listed.splitlines()[1].split()
    by_digest = f"{EXPORTER.name.rpartition(':')[0]}@{digest}"
    subprocess.run(
        cluster.node.command(*containerd, "tag", EXPORTER.name, by_digest),
        check=True,
        capture_output=True,
    )
    return digest


@pytest.fixture(scope="module")
def pods(cluster: Cluster, digest: str, scratch: Path) -> Iterator[list[Object]]:
    """The pods of the installation; its node gets the label of the affinity only afterwards."""
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "infrastructure"},
        "value": 1000,
    }
    spaces = [namespace("db"), namespace("bank")]
    cluster.apply([priority, *spaces, vmi("orders", "db"), vmi("ledger", "bank")])
    values = {**site_values(digest), "tls": {"certManager": {"enabled": False}}}
    file = scratch / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
        terminal.type_unlisted(f"helm install {NAME} {CHART} -n {NAMESPACE} --values {file}")
        wait_for(lambda: all_unschedulable(cluster), "no node fits the affinity")
        terminal.type_unlisted("kubectl label node n1 node-role.kubernetes.io/infra=")
        cluster.rolled_out()
        yield cluster.pods()
        terminal.type_unlisted(f"helm uninstall {NAME} -n {NAMESPACE}")
        terminal.type_unlisted("kubectl label node n1 node-role.kubernetes.io/infra-")
    cluster.remove("db", "bank")
    cluster.kubectl("delete", "priorityclass", "infrastructure")


def all_unschedulable(cluster: Cluster) -> bool:
    """Whether the scheduler has found no node for any of the three pods."""
    reasons = [
        condition.get("reason")
        for pod in cluster.pods()
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "PodScheduled"
    ]
    return reasons == ["Unschedulable"] * 3


def test_the_pods_are_those_of_the_values(
    pods: list[Object], digest: str, prove: Callable[[str], None]
) -> None:
    """The pods run the image of the digest, with the priority and the labels."""
    for pod in pods:
        (status,) = pod["status"]["containerStatuses"]
        assert status["ready"]
        assert pod["spec"]["containers"][0]["image"].endswith(f"@{digest}")
        assert status["imageID"].endswith(f"@{digest}")
        assert pod["spec"]["priority"] == 1000
        assert pod["metadata"]["labels"]["team"] == "virtualization"
        assert pod["metadata"]["annotations"]["example.org/owner"] == "virtualization"
    prove(f"chart: three pods of {digest}, priority 1000, on the labelled node only")


@pytest.mark.usefixtures("pods")
def test_only_the_two_namespaces_are_seen(cluster: Cluster) -> None:
    """The exporter is healthy, and knows the VMs of the two namespaces only."""
    run = ("python", "-m", "exporter")
    status = cluster.exec(*run, "status")

    assert "Healthy" in status
    assert "shop/db1" in cluster.exec(*run, "explain", "shop/db1")
    assert "db/orders" in cluster.exec(*run, "explain", "db/orders")
    with pytest.raises(AssertionError, match="bank/ledger"):
        cluster.exec(*run, "explain", "bank/ledger")


@pytest.fixture(scope="module")
def sign_in(
    cluster: Cluster, pods: list[Object], scratch: Path
) -> Iterator[Callable[[str], AbstractContextManager[Terminal]]]:
    """Opens the shell of a user.

    Alice has the documented role, bob has none, and carol has the role without its second rule.
    """
    del pods
    (document,) = code_blocks(SECTIONS[OWN_MACHINE], "yaml")
    role = yaml.safe_load(document)
    less = {**role, "metadata": {**role["metadata"], "name": "less"}, "rules": role["rules"][:1]}
    cluster.apply([namespace(DESK), role, less])
    for name in ("alice", "bob", "carol"):
        cluster.kubectl("-n", DESK, "create", "serviceaccount", name)
    for name, bound in (("alice", role), ("carol", less)):
        chosen = f"--role={bound['metadata']['name']}"
        account = f"--serviceaccount={DESK}:{name}"
        cluster.kubectl("-n", NAMESPACE, "create", "rolebinding", name, chosen, account)
    write_plugin(scratch)

    def open_shell(name: str) -> Terminal:
        token = cluster.kubectl("-n", DESK, "create", "token", name).strip()
        user = User(name, cluster.directory / "ca.crt", token)
        file = kubeconfig(scratch / f"{name}.kubeconfig", SERVER, user)
        terminal = cluster.terminal(scratch)
        terminal.type_unlisted(f'export KUBECONFIG={file} PATH="{scratch}:$PATH"')
        return terminal

    yield open_shell
    cluster.kubectl("delete", "namespace", DESK)


def test_who_may_ask(
    sign_in: Callable[[str], AbstractContextManager[Terminal]], prove: Callable[[str], None]
) -> None:
    """The documented role is enough for the documented command; without it, a sentence says why."""
    (command,) = [
        command for command in commands(SECTIONS[OWN_MACHINE]) if "--exporter-namespace" in command
    ]
    everywhere = "kubectl evictions explain shop/db1"
    with sign_in("alice") as alice:
        answer = alice.type(command)
        elsewhere = alice.type_unlisted(f"! {everywhere} 2>&1")
    with sign_in("bob") as bob:
        unlisted = bob.type_unlisted(f"! {command} 2>&1")
    with sign_in("carol") as carol:
        unexecuted = carol.type_unlisted(f"! {command} 2>&1")

    assert "shop/db1" in answer
    assert "has the role that is needed (with --exporter-namespace" in elsewhere
    assert unlisted.startswith("kubectl evictions: the exporter's pods cannot be listed: ")
    assert unlisted.endswith("; docs/operate.md has the role that is needed\n")
    assert "pods/exec" in unexecuted
    for name, text in (("alice", answer), ("bob", unlisted), ("carol", unexecuted)):
        prove(f"{name}: {text.splitlines()[0]}")
