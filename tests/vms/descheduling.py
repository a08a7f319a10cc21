"""Real VMs under the real descheduler: alone, with our plugin, and with our webhook.

`python -m tests.vms.descheduling [--minutes 30] [--write]` runs the descheduler in each of the
three ways, one after another on one cluster and for that many minutes each, and prints a table.
`--write` puts the table into docs/hold-evictions.md. First run `make test-vms`, which checks the
machine and builds the images.

Three equal VMs on two nodes can never be balanced, so every cycle finds a VM to move.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import yaml

from exporter.kube.objects.instants import parse_instant
from tests.e2e.cluster import Cluster
from tests.e2e.documents import CERTIFICATE, SECTIONS, commands, type_section
from tests.e2e.images import DESCHEDULER, ROOT
from tests.e2e.node import Node
from tests.generate.manifests import NAMESPACE
from tests.vms.conftest import check_out_with
from tests.vms.kubevirt import Machine, running_vms


DOCUMENT = ROOT / "docs" / "hold-evictions.md"
VMS = ("vm0", "vm1", "vm2")
WAYS = ("nothing", "webhook", "plugin")
_BEGIN, _END = "<!-- measured -->\n", "<!-- measured: end -->\n"
_REQUESTS = {"cpu": "600m", "memory": "2Gi"}
_ACCOUNT = "descheduler-sa"
_EVERY = 5.0


@dataclass(frozen=True)
class Moves:
    """When the migrations of each VM were requested and when they ended, by VMIM."""

    cooldown: float
    requested: dict[tuple[str, str], float] = field(default_factory=dict)
    ended: dict[tuple[str, str], float] = field(default_factory=dict)

    def record(self, machine: Machine) -> None:
        """Add new migrations; to be called often, because KubeVirt deletes old VMIMs."""
        for vmim in machine.migrations():
            key = machine.name, vmim["metadata"]["name"]
            self.requested[key] = parse_instant(vmim["metadata"]["creationTimestamp"]) or 0.0
            state = vmim.get("status", {}).get("migrationState") or {}
            if end := parse_instant(state.get("endTimestamp")):
                self.ended[key] = end

    def of(self, name: str) -> list[tuple[str, str]]:
        """The migrations of a VM, the oldest first."""
        mine = [key for key in self.requested if key[0] == name]
        return sorted(mine, key=lambda key: self.requested[key])

    def too_early(self) -> int:
        """How many migrations were requested inside a cooldown, which each migration doubles."""
        count = 0
        for name in VMS:
            mine = self.of(name)
            for number, (before, key) in enumerate(pairwise(mine)):
                over = self.ended.get(before, self.requested[before]) + self.cooldown * 2**number
                # KubeVirt writes whole seconds.
                count += self.requested[key] < over - 1
        return count


def measure(cluster: Cluster, nodes: dict[str, Node], way: str, minutes: float) -> Moves:
    """Run the descheduler in one of the three ways; returns the migrations."""
    machines = [Machine(name, cluster, nodes) for name in VMS]
    moves = Moves(minutes * 60 / 2)
    with tempfile.TemporaryDirectory() as folder, _installed(cluster, Path(folder), way, moves):
        for machine in machines:
            machine.start("n1" if machine.name == VMS[0] else "n2", requests=_REQUESTS)
        _scale(cluster, way, 1)
        ends = time.monotonic() + minutes * 60
        while time.monotonic() < ends:
            for machine in machines:
                moves.record(machine)
            time.sleep(_EVERY)
        _scale(cluster, way, 0)
        for machine in machines:
            machine.until(lambda: len(machine.pods()) == 1, "one pod")  # noqa: B023
            moves.record(machine)
            machine.delete()
    return moves


@contextmanager
def _installed(cluster: Cluster, folder: Path, way: str, moves: Moves) -> Iterator[None]:
    """Install the exporter, and a descheduler that does not run yet."""
    checkout = check_out_with(folder / "checkout", moves.cooldown)
    with cluster.terminal(folder, checkout) as terminal:
        if way != "nothing":
            type_section(terminal, CERTIFICATE)
        if way == "webhook":
            for command in commands(SECTIONS["Five steps"])[:3]:
                terminal.type_unlisted(command)
        if way == "plugin":
            path = checkout / "deploy/components/descheduler/deployment.yaml"
            text = path.read_text()
            assert text.count("cpu: 500m") == 1
            # Otherwise the pod would request about as much CPU as a VM.
            path.write_text(text.replace("cpu: 500m", "cpu: 10m"))
            terminal.type_unlisted("kubectl apply --server-side -k deploy/overlays/sidecar")
            _scale(cluster, way, 0)
        else:
            _install_stock(cluster, checkout)
        yield
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "mutatingwebhookconfigurations", "--all")


def _install_stock(cluster: Cluster, checkout: Path) -> None:
    """Install the descheduler as a Deployment, with our policy without our plugin."""
    rules = yaml.safe_load_all((checkout / "deploy/components/descheduler/rbac.yaml").read_text())
    role = next(rule for rule in rules if rule["kind"] == "ClusterRole")
    policy = yaml.safe_load((checkout / "deploy/descheduler/policy.yaml").read_text())
    (profile,) = policy["profiles"]
    profile["pluginConfig"].pop()
    for point in ("filter", "preevictionfilter"):
        profile["plugins"][point]["enabled"] = ["DefaultEvictor"]
    own = {"namespace": "kube-system", "name": _ACCOUNT}
    subject = {"kind": "ServiceAccount", **own}
    group = "rbac.authorization.k8s.io"
    reference = {"apiGroup": group, "kind": "ClusterRole", "name": role["metadata"]["name"]}
    container = {
        "name": "descheduler",
        "image": DESCHEDULER.name,
        "command": ["/bin/descheduler"],
        "args": [
            "--policy-config-file=/policy/policy.yaml",
            "--descheduling-interval=60s",
            "--feature-gates=EvictionsInBackground=true",
            "--v=3",
        ],
        "volumeMounts": [{"name": "policy", "mountPath": "/policy"}],
    }
    pod = {
        "serviceAccountName": _ACCOUNT,
        "containers": [container],
        "volumes": [{"name": "policy", "configMap": {"name": _ACCOUNT}}],
    }
    labels = {"app": _ACCOUNT}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    binding = {"metadata": {"name": _ACCOUNT}, "roleRef": reference, "subjects": [subject]}
    cluster.apply(
        [
            role,
            {"apiVersion": f"{group}/v1", "kind": "ClusterRoleBinding", **binding},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": own},
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": own,
                "data": {"policy.yaml": json.dumps(policy)},
            },
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": own, "spec": spec},
        ]
    )


def _scale(cluster: Cluster, way: str, replicas: int) -> None:
    """Start or stop the descheduler."""
    if way == "plugin":
        place, name = NAMESPACE, NAMESPACE
    else:
        place, name = "kube-system", _ACCOUNT
    cluster.kubectl("-n", place, "scale", f"deployment/{name}", f"--replicas={replicas}")
    if replicas:
        cluster.kubectl("-n", place, "rollout", "status", f"deployment/{name}", "--timeout=300s")


def render(totals: dict[str, Moves], minutes: float) -> str:
    """The table, as it is in the document."""
    lines = [
        f"Three VMs on two nodes, a cycle of 60 s, {minutes:g} minutes for each row, a cooldown of",
        f"{minutes / 2:g} minutes, which doubles with each further migration:",
        "",
        "| evictions blocked by | migrations of each VM | all | requested inside a cooldown |",
        "|---|---|---|---|",
    ]
    for way, moves in totals.items():
        each = [len(moves.of(name)) for name in VMS]
        lines.append(f"| {way} | {', '.join(map(str, each))} | {sum(each)} | {moves.too_early()} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.vms.descheduling", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for each way")
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_vms(Path(folder)) as (cluster, nodes),
    ):
        totals: dict[str, Moves] = {}
        for way in WAYS:
            totals[way] = measure(cluster, nodes, way, arguments.minutes)
            print(render(totals, arguments.minutes), flush=True)
    if arguments.write:
        text = DOCUMENT.read_text()
        table = render(totals, arguments.minutes)
        pattern = f"{_BEGIN}.*{_END}"
        assert re.search(pattern, text, re.DOTALL)
        DOCUMENT.write_text(re.sub(pattern, f"{_BEGIN}{table}{_END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
