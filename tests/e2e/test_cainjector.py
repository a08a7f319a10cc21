"""cert-manager's own cainjector and the admission webhook's `caBundle`."""

import base64
import subprocess
from pathlib import Path

import pytest

from tests.cluster.binaries import find_binary
from tests.e2e.cluster import ONLY_FULL, Cluster, wait_for
from tests.e2e.documents import CERTIFICATE, type_section
from tests.e2e.images import ROOT
from tests.e2e.test_webhook import let_evict, try_evict
from tests.generate.manifests import NAME, NAMESPACE, TLS_SECRET


pytestmark = ONLY_FULL
CALLS = 'apiserver_admission_webhook_request_total{code="200"'
WEBHOOK = f'name="evictions.{NAME}.io"'


@pytest.mark.timeout(600)
def test_it_writes_the_authority_that_the_api_server_then_trusts(
    cluster: Cluster, scratch: Path, tmp_path: Path
) -> None:
    """Cainjector writes openssl's CA into the webhook, and the API server trusts it."""
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
    owner = f"cert-manager.io/certificate-name={NAME}"
    cluster.kubectl("-n", NAMESPACE, "annotate", "secret", TLS_SECRET, owner)
    for folder in ("overlays/admission", "components/cert-manager"):
        cluster.kubectl("apply", "--server-side", "-k", str(ROOT / "deploy" / folder))
    cluster.rolled_out()

    def authority() -> str:
        assert cainjector.poll() is None, log.read_text()
        configuration = cluster.get("mutatingwebhookconfiguration", NAME)
        return str(configuration["webhooks"][0]["clientConfig"].get("caBundle", ""))

    log = tmp_path / "cainjector.log"
    with log.open("w") as written:
        cainjector = subprocess.Popen(
            [find_binary("cainjector")], env=cluster.environment, stdout=written, stderr=written
        )
    try:
        bundle = wait_for(authority, "caBundle")
    finally:
        cainjector.kill()
        cainjector.wait()
    secret = cluster.get("-n", NAMESPACE, "secret", TLS_SECRET)
    assert base64.b64decode(bundle) == base64.b64decode(secret["data"]["ca.crt"])

    let_evict(cluster)

    def called() -> bool:
        """Whether the webhook is called for the eviction of a pod that does not exist."""
        assert "NotFound" in try_evict(cluster, "virt-launcher-nobody")
        counted = cluster.kubectl("get", "--raw", "/metrics").splitlines()
        return any(line.startswith(CALLS) and WEBHOOK in line for line in counted)

    wait_for(called, "a review that the exporter answered")
    # Another test installs by Helm, which refuses objects that kustomize has created.
    kinds = "mutatingwebhookconfiguration,clusterrole,clusterrolebinding"
    cluster.kubectl("delete", kinds, "-l", f"app.kubernetes.io/name={NAME}")
    cluster.remove()
