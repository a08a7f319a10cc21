"""Two nodes with KubeVirt and VMs, and the exporter on them."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.versions import is_kubernetes_at_least
from tests.e2e.asking import Caller, let_in
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.documents import SECTIONS, commands
from tests.e2e.images import ROOT
from tests.e2e.node import Node
from tests.e2e.terminal import Terminal
from tests.e2e.test_absence import left_behind
from tests.generate.manifests import NAME, NAMESPACE
from tests.vms.kubevirt import Machine, running_vms


COOLDOWN = 60.0
"""The cooldown in seconds after a VM's first move."""
STUCK_AFTER = 90.0
"""`stuck.after` in seconds."""


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, Node]]]:
    """The cluster and its two nodes, in whose network the tests run."""
    directory = tmp_path_factory.mktemp("cluster")
    with running_vms(directory) as nodes:
        yield nodes
    # If no cgroup is left, no process of the nodes is left. Then their mounts and networks are
    # gone, too.
    ours = {str(node.supervisor.pid) for node in nodes[1].values()}
    assert ours.isdisjoint(group.rpartition("-")[2] for group in left_behind()["cgroups"])
    assert not list(directory.glob("n?/*"))


@pytest.fixture(scope="session")
def cluster(nodes: tuple[Cluster, dict[str, Node]]) -> Cluster:
    """The cluster."""
    return nodes[0]


@pytest.fixture
def machine(nodes: tuple[Cluster, dict[str, Node]]) -> Iterator[Callable[[str], Machine]]:
    """Creates VMs by name, and deletes them after the test."""
    made: list[Machine] = []

    def make(name: str) -> Machine:
        made.append(Machine(name, *nodes))
        return made[-1]

    yield make
    for vm in made:
        vm.delete()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our manifests with shorter times, and with the webhook enforced."""
    return check_out_with(tmp_path_factory.mktemp("checkout"), COOLDOWN)


@pytest.fixture(scope="session")
def exporter(
    cluster: Cluster, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Terminal, Caller]]:
    """Two replicas with the webhook, installed by the documented commands, and a caller."""
    apply, rollout, trust, *_ = commands(SECTIONS["Five steps"])
    with let_in(cluster, tmp_path_factory.mktemp("scratch"), checkout) as (terminal, caller):
        if is_kubernetes_at_least("1.38"):
            # Before the exporter, which tries a forbidden resource only every five minutes again.
            terminal.type("kubectl apply -k deploy/components/eviction-requests")
        for command in (apply, rollout, trust):
            terminal.type(command)
        cluster.kubectl(*("create", "clusterrole", "reader", "--verb=get", "--non-resource-url=/*"))
        cluster.kubectl(
            *("create", "clusterrolebinding", "reader", "--clusterrole=reader"),
            "--serviceaccount=my-tools:my-caller",
        )
        yield terminal, caller
    cluster.kubectl("delete", "mutatingwebhookconfiguration", NAME)


@pytest.fixture(scope="session")
def terminal(exporter: tuple[Terminal, Caller]) -> Terminal:
    """The shell of the user who has installed the exporter."""
    return exporter[0]


@pytest.fixture(scope="session")
def caller(exporter: tuple[Terminal, Caller]) -> Caller:
    """A caller through the Service."""
    return exporter[1]


@pytest.fixture
def quote(cluster: Cluster, prove: Callable[[str], None]) -> Callable[[Object], str]:
    """Waits for the log line about a migration's end, prints it, and returns the reason."""

    def show(vmim: Object) -> str:
        uid = vmim["metadata"]["uid"]

        def find() -> Object | None:
            ended = (entry for entry in read_log(cluster) if entry["event"] == "migration_ended")
            return next((entry for entry in ended if entry["kubevirt.migration.uid"] == uid), None)

        line = wait_for(find, f"the end of migration {uid} in the log") or {}
        phase, reason = line["kubevirt.migration.phase"], str(line["error.type"])
        words = line["error.message"][:120]
        prove(f"migration_ended: {reason}: phase {phase!r}, message {words!r}")
        return reason

    return show


def check_out_with(folder: Path, cooldown: float) -> Path:
    """Our manifests in a folder, with a cooldown in seconds, a shorter `stuck.after`, and with the
    webhook enforced. Where Kubernetes answers EvictionRequests, the exporter does too.
    """
    for name in ("deploy", "alerts"):
        shutil.copytree(ROOT / name, folder / name)
    for config in ("overlays/standalone", "overlays/sidecar", "components/admission"):
        path = folder / "deploy" / config / "config.yaml"
        text = path.read_text()
        assert text.count("migrationCooldown: 15m") == 1
        text = text.replace("migrationCooldown: 15m", f"migrationCooldown: {cooldown:g}s")
        text = text.replace("mode: warn", "mode: enforce")
        text = f"{text}stuck: {{after: {STUCK_AFTER:g}s}}\n"
        if is_kubernetes_at_least("1.38"):
            text += "evictionRequests: {mode: respond}\n"
        path.write_text(text)
    return folder


def read_log(cluster: Cluster) -> list[Object]:
    """The log lines of the replicas whose node can be reached."""
    selected = ("-l", f"app.kubernetes.io/name={NAME}", "-c", "exporter", "--tail=-1")
    return [
        json.loads(line)
        for line in cluster.kubectl(
            "-n", NAMESPACE, "logs", "--ignore-errors", *selected
        ).splitlines()
        if line.startswith("{")
    ]
