"""A real cluster as its administrator uses it, with kubectl and a shell."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cluster.binaries import find_binary
from tests.e2e.images import FULL, PAUSE, ROOT
from tests.e2e.node import Node, log_tails
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAME, NAMESPACE


T = TypeVar("T")
Object = dict[str, Any]

ONLY_FULL = pytest.mark.skipif(not FULL, reason="only in make test-e2e FULL=1")
"""Marks tests that take longer."""
PATIENCE = 180.0
"""The longest wait in seconds; an idle machine needs only a few seconds."""
DEPLOYMENT = f"deployment/{NAME}"


def wait_for(attempt: Callable[[], T], what: str, within: float = PATIENCE) -> T:
    """Repeat until the result is true, and return it."""
    deadline = time.monotonic() + within
    while not (answer := attempt()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within:g} s")
        time.sleep(0.1)
    return answer


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    directory: Path
    """The folder of the logs and certificates."""
    node: Node
    kubeconfig: Path
    """The administrator's kubeconfig."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a shell that reaches the cluster."""
        tools = [str(find_binary(name).parent) for name in ("kubectl", "helm")]
        path = os.pathsep.join([*tools, os.environ["PATH"]])
        return {**os.environ, "PATH": path, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *arguments: str, given: str = "") -> str:
        """Run kubectl, which must succeed; returns its output."""
        ended = self.try_kubectl(*arguments, given=given)
        assert ended.returncode == 0, f"kubectl {' '.join(arguments)}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def try_kubectl(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl, which may fail."""
        return subprocess.run(
            ["kubectl", *arguments],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
        )

    def get(self, *arguments: str) -> Object:
        """The result of `kubectl get`, as JSON."""
        document: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return document

    def apply(self, objects: Iterable[Object]) -> None:
        """Apply objects by server-side apply."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(listed)
        )

    def terminal(self, folder: Path, checkout: Path = ROOT) -> Terminal:
        """A shell in the root of a checkout, with its own folder for temporary files."""
        return Terminal({**self.environment, "TMPDIR": str(folder)}, checkout)

    def wait_until_ready(self, *crds: Path) -> None:
        """Wait for the node, and for CRDs from files."""
        try:
            wait_for(
                lambda: self.try_kubectl("get", "--raw", "/readyz").returncode == 0, "API server"
            )
            for file in crds:
                self.apply(json.loads(file.read_bytes()))
            self.wait_for_node(self.node.name)
            if crds:
                self.kubectl("wait", "--for=condition=Established", "crd", "--all")
        except (AssertionError, TimeoutError) as failure:
            failure.add_note(log_tails(self.directory))
            raise

    def wait_for_node(self, name: str) -> None:
        """Wait until a node exists and is Ready."""
        wait_for(lambda: self.try_kubectl("get", "node", name).returncode == 0, f"node {name}")
        self.kubectl("wait", "--for=condition=Ready", f"node/{name}", f"--timeout={PATIENCE:g}s")

    def run_pause(self, namespace: str, name: str, **labels: str) -> None:
        """Run a Deployment of a container that does nothing."""
        labels = {"app": name, **{key.replace("_", "."): value for key, value in labels.items()}}
        pod = {
            "containers": [{"name": "pause", "image": PAUSE.name}],
            "terminationGracePeriodSeconds": 1,
        }
        template = {"metadata": {"labels": labels}, "spec": pod}
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
        self.apply([deployment])

    # Our own namespace

    def rolled_out(self) -> None:
        """Wait until our Deployment is rolled out; on failure show the logs of its pods."""
        ended = self.try_kubectl(
            "-n", NAMESPACE, "rollout", "status", DEPLOYMENT, f"--timeout={PATIENCE:g}s"
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr + self.describe()

    def remove(self, *others: str) -> None:
        """Delete our namespace and others.

        The pods go first: Kubernetes visits a namespace whose pods still end only after half of
        their grace period again.
        """
        self.kubectl("-n", NAMESPACE, "delete", "deployments", "--all", "--cascade=foreground")
        self.kubectl("delete", "namespace", NAMESPACE, *others)

    def pods(self) -> list[Object]:
        """The exporter's pods that are not being deleted."""
        selector = f"app.kubernetes.io/name={NAME}"
        pods = self.get("-n", NAMESPACE, "pods", "-l", selector)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def describe(self) -> str:
        """The state of the pods, to explain why they do not start."""
        return "".join(
            self.try_kubectl("-n", NAMESPACE, *words).stdout
            for words in (
                ("get", "pods", "-o", "wide"),
                ("get", "events", "--sort-by=.lastTimestamp"),
                ("logs", "-l", f"app.kubernetes.io/name={NAME}", "--all-containers", "--tail=20"),
            )
        )

    def exec(self, *command: str, container: str = "exporter") -> str:
        """Run a command in a container of our pod."""
        return self.kubectl("-n", NAMESPACE, "exec", DEPLOYMENT, "-c", container, "--", *command)
