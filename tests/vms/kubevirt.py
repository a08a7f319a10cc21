"""KubeVirt installed by its own virt-operator, and its VMs."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import namespace
from tests.cluster.binaries import find_operator
from tests.cluster.versions import is_kubevirt_at_least
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.node import Node, inside_network, joined, prepare, running
from tests.vms.images import GUEST, IMAGES, digest_name


SPACE = "shop"
SLOW = "slow"
"""The label of a VM whose memory is copied at 1 MiB/s, so that a migration takes over a minute."""
LATE = "late"
"""Like `SLOW`, but KubeVirt aborts the migration after about ten seconds."""
PATIENCE = 600.0
"""The longest wait in seconds; an idle machine needs about a minute."""
_INSTALLED_WITHIN = 1200.0
_SMALL = {"cpu": "50m"}


@contextmanager
def running_vms(directory: Path) -> Iterator[tuple[Cluster, dict[str, Node]]]:
    """Run two nodes with KubeVirt during the block, which is in the network of the first."""
    config = prepare(directory, IMAGES)
    with (
        running("n1", directory) as first,
        inside_network(first),
        joined(first, directory) as second,
    ):
        cluster = Cluster(directory, first, config)
        cluster.wait_until_ready()
        cluster.wait_for_node(second.name)
        install(cluster)
        for node in (first, second):
            name_guest_image(node)
        cluster.apply([namespace(SPACE)])
        yield cluster, {first.name: first, second.name: second}


def install(cluster: Cluster) -> None:
    """Install KubeVirt, and wait until both nodes can run VMs."""
    cluster.kubectl("label", "node", "n1", "node-role.kubernetes.io/control-plane=")
    cluster.apply(json.loads(find_operator().read_bytes())["items"])
    # An account can grant only permissions that it has itself. So the operator gets all
    # permissions.
    account = "--serviceaccount=kubevirt:kubevirt-operator"
    cluster.kubectl(
        "create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", account
    )
    wait_for(lambda: cluster.try_kubectl("get", "kubevirts", "-A").returncode == 0, "the CRD")
    cluster.apply([_kubevirt()])
    within = f"--timeout={_INSTALLED_WITHIN:g}s"
    available = "--for=condition=Available"
    cluster.kubectl("-n", "kubevirt", "wait", "kubevirt/kubevirt", available, within)
    cluster.kubectl("-n", "kubevirt", "rollout", "status", "daemonset/virt-handler", within)
    schedulable = "kubevirt.io/schedulable=true"
    wait_for(lambda: len(cluster.get("nodes", "-l", schedulable)["items"]) == 2, "both nodes")
    cluster.apply([_policy(SLOW, {}), _policy(LATE, {"completionTimeoutPerGiB": 10})])


def _kubevirt() -> Object:
    migrations = {"bandwidthPerMigration": "64Mi", "parallelMigrationsPerCluster": 5}
    # KubeVirt 1.9 enables these feature gates by default, but containerd 1.6 has no image volumes,
    # and there are no modules to build virt-template from. KubeVirt 1.7 does not know the field.
    disabled = {"disabledFeatureGates": ["ImageVolume", "Template"]}
    if not is_kubevirt_at_least("1.8"):
        disabled = {}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {
            "imagePullPolicy": "Never",
            "infra": {"replicas": 1},
            "configuration": {
                "imagePullPolicy": "Never",
                "evictionStrategy": "LiveMigrate",
                "developerConfiguration": {"useEmulation": True, **disabled},
                "migrations": migrations,
                # On some machines the emulated host model is kvm64. KubeVirt counts it as obsolete
                # by default, and then finds no target node for a VM with the host model.
                "obsoleteCPUModels": {"486": True},
            },
        },
    }


def _policy(name: str, limits: Object) -> Object:
    selectors = {"virtualMachineInstanceSelector": {"copied": name}}
    return {
        "apiVersion": "migrations.kubevirt.io/v1alpha1",
        "kind": "MigrationPolicy",
        "metadata": {"name": name},
        "spec": {"bandwidthPerMigration": "1Mi", "selectors": selectors, **limits},
    }


@dataclass(frozen=True)
class Machine:
    """A real VM on KubeVirt."""

    name: str
    cluster: Cluster
    nodes: dict[str, Node]

    # What KubeVirt shows

    def get(self) -> Object:
        """The VMI."""
        return self.cluster.get("-n", SPACE, "vmi", self.name)

    @property
    def node(self) -> str:
        """The node where the VM runs."""
        return str(self.get()["status"]["nodeName"])

    def state(self) -> Object:
        """The VMI's `migrationState`; empty without a migration."""
        state: Object = self.get()["status"].get("migrationState") or {}
        return state

    def migrations(self) -> list[Object]:
        """The VM's VMIMs, the oldest first."""
        listed = self.cluster.get("-n", SPACE, "vmim", "-l", f"kubevirt.io/vmi-name={self.name}")
        return sorted(listed["items"], key=lambda vmim: str(vmim["metadata"]["creationTimestamp"]))

    def pods(self) -> list[Object]:
        """The VM's unfinished launcher pods."""
        pods = self.cluster.get("-n", SPACE, "pods", "-l", f"vm={self.name}")["items"]
        return [pod for pod in pods if pod["status"]["phase"] not in {"Succeeded", "Failed"}]

    def launcher(self) -> str:
        """The name of the launcher pod in which the VM runs."""
        node = self.node
        return next(
            str(pod["metadata"]["name"])
            for pod in self.pods()
            if pod["spec"].get("nodeName") == node
        )

    # Changes

    def start(
        self,
        node: str,
        *,
        fill: int = 32,
        copied: str = "fast",
        requests: Mapping[str, str] = _SMALL,
        image: str = GUEST.name,
        strategy: str = "LiveMigrate",
    ) -> None:
        """Start the VM on a node, and wait until this many MiB of its memory are filled."""
        others = [name for name in self.nodes if name != node]
        self.cluster.kubectl("cordon", *others)
        self.cluster.apply([self._guest(fill, copied, requests, image, strategy)])
        self.until(lambda: self.get().get("status", {}).get("phase") == "Running", "running")
        self.cluster.kubectl("uncordon", *others)
        self.until(self._is_filled, "its memory filled")

    def migrate(self) -> str:
        """Migrate the VM; returns the VMIM's name."""
        vmim = {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstanceMigration",
            "metadata": {"generateName": f"{self.name}-", "namespace": SPACE},
            "spec": {"vmiName": self.name},
        }
        made = self.cluster.kubectl("create", "-o", "name", "-f", "-", given=json.dumps(vmim))
        return made.strip().rpartition("/")[2]

    def abort(self, vmim: str) -> None:
        """Delete a VMIM: KubeVirt aborts the migration if it still can."""
        self.cluster.kubectl("-n", SPACE, "delete", "vmim", vmim, "--wait=false")

    def label(self, **labels: str) -> None:
        """Add labels to the VM."""
        given = [f"{key}={value}" for key, value in labels.items()]
        self.cluster.kubectl("-n", SPACE, "label", "vmi", self.name, "--overwrite", *given)

    def evict(self, *options: str, annotations: Mapping[str, str] | None = None) -> str:
        """Evict the launcher pod; returns the API server's answer."""
        pod = self.launcher()
        metadata = {"name": pod, "namespace": SPACE, "annotations": dict(annotations or {})}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{SPACE}/pods/{pod}/eviction"
        ended = self.cluster.try_kubectl(
            *("create", "--raw", path, "-f", "-", *options), given=json.dumps(eviction)
        )
        return ended.stdout + ended.stderr

    def kill_qemu(self, node: str) -> None:
        """Kill the VM's QEMU on a node as soon as it runs."""
        of_guest = f"^/usr/bin/qemu-system-x86_64 -name guest={SPACE}_{self.name},"
        kill = self.nodes[node].command("pkill", "-KILL", "-f", of_guest)
        self.until(lambda: subprocess.run(kill, check=False).returncode == 0, "a QEMU to kill")

    def delete(self) -> None:
        """Delete the VM and its other objects."""
        self.cluster.kubectl("-n", SPACE, "delete", "vmi", self.name, "--ignore-not-found")
        chosen = f"kubevirt.io/vmi-name={self.name}"
        self.cluster.kubectl("-n", SPACE, "delete", "vmim", "-l", chosen, "--wait=false")
        self.until(lambda: not self.pods(), "no pod")

    # Waiting

    def until(self, is_so: Callable[[], object], what: str) -> None:
        """Wait until a condition holds."""
        try:
            wait_for(is_so, f"{self.name}: {what}", PATIENCE)
        except TimeoutError as late:
            late.add_note(self.describe())
            raise

    def until_copying(self) -> None:
        """Wait until a migration copies memory."""
        self.until(
            lambda: (
                (state := self.state()).get("startTimestamp")
                and not state.get("endTimestamp")
                and state.get("mode")
            ),
            "copying",
        )

    def until_moved(self, source: str) -> None:
        """Wait until the VM has left a node, and has only one pod."""
        self.until(
            lambda: self.node != source and self.state().get("completed"), f"away from {source}"
        )
        self.until(lambda: len(self.pods()) == 1, "one pod")

    def until_unmounted(self, node: str, pod: Object) -> None:
        """Wait until virt-handler has unmounted the kernel of a launcher pod that the VM has left.

        If the VM comes back earlier, virt-handler 1.9 forgets the kernel of the pod in which it
        then runs. It stays mounted, so the kubelet cannot remove this pod, and the VMI is not
        deleted.
        """
        kernel = f"/{pod['metadata']['uid']}/.*/kernel-boot/"
        mounts = self.nodes[node].command("cat", "/proc/self/mountinfo")
        self.until(
            lambda: not re.search(kernel, subprocess.check_output(mounts, text=True)),
            f"no kernel mounted on {node}",
        )

    def until_ended(self, vmim: str) -> Object:
        """Wait for the end of a migration; returns its VMIM."""
        self.until(lambda: _phase(self._migration(vmim)) in {"Succeeded", "Failed"}, f"{vmim} over")
        return self._migration(vmim)

    def describe(self) -> str:
        """The state of the VM, to explain a failure."""
        asked = (
            ("get", "vmi,vmim,pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "-l", f"vm={self.name}", "-c", "guest-console-log", "--tail=20"),
        )
        words, events, console = (
            self.cluster.try_kubectl("-n", SPACE, *arguments).stdout for arguments in asked
        )
        recent = "\n".join(events.splitlines()[-20:])
        state = json.dumps(self.cluster.get("-n", SPACE, "vmis")["items"], indent=1)
        return "\n".join([words, recent, console, state[:6000]])

    def _migration(self, name: str) -> Object:
        return self.cluster.get("-n", SPACE, "vmim", name)

    def _is_filled(self) -> bool:
        log = ("-n", SPACE, "logs", self.launcher(), "-c", "guest-console-log")
        return "filled" in self.cluster.try_kubectl(*log).stdout

    def _guest(
        self, fill: int, copied: str, requests: Mapping[str, str], image: str, strategy: str
    ) -> Object:
        boot = {"kernelPath": "/boot/vmlinuz", "initrdPath": "/boot/initrd"}
        container = {"image": image, "imagePullPolicy": "Never", **boot}
        return {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {
                "name": self.name,
                "namespace": SPACE,
                "labels": {"vm": self.name, "copied": copied},
            },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "evictionStrategy": strategy,
                "domain": {
                    "memory": {"guest": "256Mi"},
                    # With a CPU limit KubeVirt copies memory over one connection, which respects
                    # the limit of the bandwidth.
                    "resources": {"requests": dict(requests), "limits": {"cpu": "2"}},
                    "firmware": {
                        "kernelBoot": {
                            "container": container,
                            # Without KVM the kernel's test of its timer can fail on a busy machine.
                            "kernelArgs": f"console=ttyS0 quiet no_timer_check fill={fill}",
                        }
                    },
                    "devices": {
                        "autoattachPodInterface": False,
                        "autoattachMemBalloon": False,
                        "autoattachGraphicsDevice": False,
                        "logSerialConsole": True,
                    },
                },
                "networks": [],
            },
        }


def name_guest_image(node: Node, repository: str = GUEST.name.partition(":")[0]) -> None:
    """Name the guest's image on a node by tag and by digest."""
    _, _, digest = digest_name(GUEST).partition("@")
    for name in {f"{repository}:1", f"{repository}@{digest}"} - {GUEST.name}:
        tag = ("ctr", "-n", "k8s.io", "images", "tag", "--force", GUEST.name, name)
        subprocess.run(node.command(*tag), check=True, capture_output=True)


def _phase(vmim: Object) -> str:
    return str(vmim.get("status", {}).get("phase", ""))
