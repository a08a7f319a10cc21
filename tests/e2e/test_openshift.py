"""OpenShift's overlay runs as a user that the SCC restricted-v2 chooses, by the documented steps.

The certificate is from openssl instead of the service CA.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.documents import CERTIFICATE, type_section
from tests.e2e.images import ROOT
from tests.generate.manifests import NAME, NAMESPACE


POLICIES = ROOT / "tests/support/restricted_v2.yaml"
CHOSEN = 1000680000
"""The user and the group that the policies choose."""


@pytest.fixture
def restricted(cluster: Cluster) -> Iterator[None]:
    """The rules of restricted-v2 are in force."""
    policies = list(yaml.safe_load_all(POLICIES.read_text(encoding="utf-8")))
    cluster.apply(policies)
    cluster.kubectl("create", "namespace", NAMESPACE)

    def in_force() -> bool:
        trial = ("trial", "--image=localhost/pause:1", "--dry-run=server", "-o", "json")
        made = cluster.try_kubectl("-n", NAMESPACE, "run", *trial)
        return f'"runAsUser": {CHOSEN}' in made.stdout

    wait_for(in_force, "the policies in force")
    yield
    cluster.kubectl("delete", "-f", str(POLICIES))


@pytest.mark.usefixtures("restricted")
def test_it_runs_as_any_user(cluster: Cluster, scratch: Path) -> None:
    """The image runs as a user that it does not know, and answers."""
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
        type_section(terminal, "OpenShift")
    who = cluster.exec("python", "-c", "import os; print(os.getuid(), os.getgroups())")
    output = cluster.exec("python", "-m", "exporter", "status")
    kinds = "clusterrole,clusterrolebinding"
    cluster.kubectl("delete", kinds, "-l", f"app.kubernetes.io/name={NAME}")
    cluster.remove()

    assert who.split()[0] == str(CHOSEN)
    assert str(CHOSEN) in who.partition("[")[2]
    assert "Healthy" in output
