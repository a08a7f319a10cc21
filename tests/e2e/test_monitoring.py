"""The real Prometheus operator with Prometheus and Alertmanager, and the page in a browser."""

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.cluster import vmi
from tests.e2e.cluster import ONLY_FULL, Cluster, Object, wait_for
from tests.e2e.documents import CERTIFICATE, SECTIONS, commands, type_section
from tests.e2e.images import ALERTMANAGER, OPERATOR, PROMETHEUS, RELOADER, ROOT
from tests.generate.manifests import only, overlay
from tests.integration.deploy.test_operator import operator_crds
from tests.support.browser import chromium
from tests.support.builders import rfc3339


MONITORING = "monitoring"
"""The namespace of the operator, its Prometheus and its Alertmanager."""
METADATA = {"name": "stack", "namespace": MONITORING}
STUCK_FOR = timedelta(hours=2)
VERSION = re.compile(r"github.com/prometheus/alertmanager (v\S+)")
"""Finds Alertmanager's version in go.mod: the operator passes the flags of this version."""


def operator() -> list[Object]:
    """The operator with all permissions, and the accounts of Prometheus and Alertmanager."""
    labels = {"app": "operator"}
    container = {
        "name": "operator",
        "image": OPERATOR.name,
        "args": [f"--prometheus-config-reloader={RELOADER.name}"],
    }
    template = {
        "metadata": {"labels": labels},
        "spec": {"serviceAccountName": "operator", "containers": [container]},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MONITORING}},
        *account("operator", "cluster-admin"),
        *account("stack", "view"),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "operator", "namespace": MONITORING},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    ]


def account(name: str, role: str) -> list[Object]:
    """A service account with a role in the whole cluster."""
    metadata = {"name": name, "namespace": MONITORING}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{MONITORING}-{name}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role,
            },
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
    ]


def stack() -> list[Object]:
    """A Prometheus that selects monitors and rules in all namespaces, and its Alertmanager."""
    target = {"name": "alertmanager-operated", "namespace": MONITORING, "port": "web"}
    example = (ROOT / "alerts/alertmanager.yaml").read_text()
    (version,) = VERSION.findall((ROOT / "tests/tools/alertmanager/go.mod").read_text())
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "Prometheus",
            "metadata": METADATA,
            "spec": {
                "podMonitorSelector": {},
                "podMonitorNamespaceSelector": {},
                "ruleSelector": {},
                "ruleNamespaceSelector": {},
                "image": PROMETHEUS.name,
                "serviceAccountName": "stack",
                "alerting": {"alertmanagers": [target]},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "example", "namespace": MONITORING},
            "stringData": {"alertmanager.yaml": example},
        },
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "Alertmanager",
            "metadata": METADATA,
            "spec": {
                "image": ALERTMANAGER.name,
                "version": version,
                "replicas": 1,
                "configSecret": "example",
            },
        },
    ]


def stuck() -> Object:
    """A VM whose evacuation was requested two hours ago without any attempt: shop/db9."""
    requested = rfc3339((datetime.now(UTC) - STUCK_FOR).timestamp())
    condition = {
        "type": "EvictionRequested",
        "status": "True",
        "lastTransitionTime": requested,
    }
    return vmi("db9", "shop", status={"evacuationNodeName": "n1", "conditions": [condition]})


@pytest.fixture(scope="module")
def installation(cluster: Cluster, scratch: Path) -> Iterator[None]:
    """The installation of mode metrics by kustomize, with a certificate from openssl."""
    cluster.apply([stuck()])
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
        type_section(terminal, "Metrics, by kustomize", without="cert-manager")
    yield
    cluster.kubectl("-n", "shop", "delete", "virtualmachineinstance", "db9")
    cluster.remove()


@pytest.mark.usefixtures("installation")
async def test_the_page_through_a_port_forward(
    cluster: Cluster,
    scratch: Path,
    tmp_path: Path,
    prove: Callable[[str], None],
) -> None:
    """Through a port-forward, the page in a real Chromium shows the stuck evacuation."""
    with cluster.terminal(scratch) as terminal:
        forward, url, *_ = commands(SECTIONS["Check that it works"])
        terminal.type(forward)
        async with chromium() as browser:
            page = await browser.new_page()
            await page.goto(url.partition("=")[2])
            await expect(page.locator("#stuck")).to_contain_text("db9")
            await page.screenshot(path=tmp_path / "page.png")
            prove(
                f"page through port-forward: {await page.locator('h1').inner_text()!r}, db9 stuck"
            )


@ONLY_FULL
@pytest.mark.usefixtures("installation")
@pytest.mark.timeout(1200)
def test_an_alert_reaches_alertmanager(
    cluster: Cluster, scratch: Path, prove: Callable[[str], None]
) -> None:
    """With only our overlay, Prometheus scrapes by TLS with a token, and sends an alert."""
    cluster.apply(operator_crds())
    cluster.apply(operator())
    wait_for(lambda: cluster.try_kubectl("get", "prometheus,alertmanager").returncode == 0, "kinds")
    cluster.apply(stack())
    with cluster.terminal(scratch) as terminal:
        install, *_ = commands(SECTIONS["Prometheus"])
        terminal.type(install)

    def ask(pod: str, path: str) -> Any:
        proxy = f"/api/v1/namespaces/{MONITORING}/pods/{pod}/proxy{path}"
        ended = cluster.try_kubectl("get", "--raw", proxy)
        return json.loads(ended.stdout) if ended.returncode == 0 else None

    def target() -> Object:
        targets = ask("prometheus-stack-0:9090", "/api/v1/targets?state=active")
        ours = targets["data"]["activeTargets"] if targets else []
        return ours[0] if [our["health"] for our in ours] == ["up"] else {}

    up = wait_for(target, "one target, up")
    assert up["scrapeUrl"].startswith("https://")
    monitor = only(overlay(resources=["overlays/monitoring"]), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"]
    prove(f"Prometheus operator: {up['scrapePool']} is {up['health']}: {up['scrapeUrl']}")

    def alert() -> Object:
        alerts = ask("alertmanager-stack-0:9093", "/api/v2/alerts") or []
        ours = [
            alert for alert in alerts if alert["labels"]["alertname"] == "KubeVirtEvacuationStuck"
        ]
        return ours[0] if ours else {}

    sent = wait_for(alert, "the alert in Alertmanager", within=900)
    assert (sent["labels"]["namespace"], sent["labels"]["name"]) == ("shop", "db9")
    assert sent["receivers"] == [{"name": "virtualization"}]
    prove(f"Alertmanager: {sent['labels']['alertname']}: {sent['annotations']['description']}")
    prove(f"pods:\n{cluster.kubectl('get', 'pods', '--all-namespaces')}")
    cluster.kubectl("delete", "namespace", MONITORING)
    cluster.kubectl("delete", "clusterrolebinding", f"{MONITORING}-operator", f"{MONITORING}-stack")
