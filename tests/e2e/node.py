"""Nodes of a real cluster, each in its own Linux namespaces; they leave nothing behind."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.binaries import find_binary
from tests.cluster.users import User, kubeconfig
from tests.cluster.versions import is_kubernetes_at_least
from tests.e2e.images import Image
from tests.support.certificates import write_certificate


ADDRESSES = {"n1": "10.211.0.2", "n2": "10.211.0.3"}
PODS = {"n1": "10.244.0.0/24", "n2": "10.244.1.0/24"}
SERVER = f"https://{ADDRESSES['n1']}:6443"

_SUPERVISE = Path(__file__).parent / "node" / "supervise"
_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""
_SERVICE = "10.96.0.1"
"""The API server's Service: the first address of its range."""


@dataclass(frozen=True)
class Node:
    """A running node."""

    name: str
    init: int
    """The process id of its init."""
    supervisor: subprocess.Popen[str]

    def power_off(self) -> None:
        """Kill the node's init, and all its processes with it."""
        os.kill(self.init, signal.SIGKILL)

    def signal(self, name: str, program: str) -> None:
        """Send a signal, such as STOP, to the processes of a program."""
        subprocess.run(self.command("pkill", f"-{name}", "-x", program), check=True)

    def command(self, *arguments: str | Path) -> list[str]:
        """The command that runs another command inside the node."""
        namespaces = ["-m", "-n", "-p", "-u", "-i", "-C"]
        return ["nsenter", f"--target={self.init}", *namespaces, *map(str, arguments)]


@contextmanager
def running(name: str, directory: Path) -> Iterator[Node]:
    """Run a node during the block.

    The node n1 has the control plane, which from Kubernetes 1.38 on answers EvictionRequests. All
    nodes of a cluster share the directory, which gets their logs: NAME-SERVER.log.
    """
    servers = ("kube-apiserver", "kubelet", "containerd")
    tools = dict.fromkeys(find_binary(server).parent for server in servers)
    path = os.pathsep.join([*map(str, tools), os.environ["PATH"], "/usr/sbin"])
    answers = "true" if is_kubernetes_at_least("1.38") else ""
    with (directory / f"{name}-supervisor.log").open("w") as log:
        supervisor = subprocess.Popen(
            [_SUPERVISE, name, ADDRESSES[name], PODS[name], directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PATH": path, "EVICTION_REQUESTS": answers},
            start_new_session=True,
        )
    assert supervisor.stdin
    assert supervisor.stdout
    try:
        printed = supervisor.stdout.readline()
        assert printed, log_tails(directory)
        yield Node(name, int(printed), supervisor)
    finally:
        supervisor.stdin.close()
        supervisor.wait()
        supervisor.stdout.close()


@contextmanager
def joined(first: Node, directory: Path) -> Iterator[Node]:
    """Run a second node during the block, and connect the two networks."""
    name, address = "n2", ADDRESSES["n2"]
    with running(name, directory) as node:
        for command in (
            f"ip link add {name} type veth peer name node0 netns {node.init}",
            f"ip link set {name} up",
            f"ip route add {address}/32 dev {name}",
            f"ip route add {PODS[name]} via {address} dev {name}",
        ):
            subprocess.run(
                ["nsenter", f"--target={first.init}", "-n", *command.split()], check=True
            )
        yield node


def prepare(directory: Path, images: Iterable[Image]) -> Path:
    """Write certificates, kubeconfigs and images; returns the administrator's kubeconfig."""
    services = ("kubernetes.default.svc", "kubernetes.default", "kubernetes")
    write_certificate(directory, "server", hosts=(ADDRESSES["n1"], _SERVICE, *services))
    for name in ("service-account", "aggregator"):
        write_certificate(directory, name)
    write_certificate(directory, "admin", group="system:masters")
    for name, address in ADDRESSES.items():
        account = f"system:node:{name}"
        write_certificate(directory, account, group="system:nodes", hosts=(name, address))
        for suffix in ("crt", "key"):
            (directory / f"{account}.{suffix}").rename(directory / f"{name}.{suffix}")
    for name in ("admin", *ADDRESSES):
        user = User(name, directory / "ca.crt", certificate=directory / f"{name}.crt")
        kubeconfig(directory / f"{name}.kubeconfig", SERVER, user)
    (directory / "images").mkdir()
    for image in images:
        (directory / "images" / image.archive.name).symlink_to(image.archive)
    return directory / "admin.kubeconfig"


@contextmanager
def inside_network(node: Node) -> Iterator[None]:
    """Enter a node's network during the block, for this thread and what it starts.

    There every port is free, and nothing of the machine's network is used or changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(namespace: int) -> None:
        if libc.setns(namespace, _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")

    with Path("/proc/self/ns/net").open() as ours, Path(f"/proc/{node.init}/ns/net").open() as its:
        enter(its.fileno())
        try:
            yield
        finally:
            enter(ours.fileno())


def log_tails(directory: Path) -> str:
    """The end of every log, for a test that has failed."""
    return "\n".join(
        f"{log.name}: " + "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        for log in sorted(directory.glob("*.log"))
    )
