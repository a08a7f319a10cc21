"""The real Prometheus operator selects our monitors and rules by the label only.

It runs as a process on a real API server. The configuration that it writes for a Prometheus shows
what it selects. No pod runs.
"""

import asyncio
import base64
import gzip
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster import ApiError, RealCluster, find_binary, poll
from tests.cluster.ports import free_port
from tests.cluster.processes import Process
from tests.cluster.resources import CRDS
from tests.generate.manifests import NAME, NAMESPACE, ROOT, TLS_SECRET, Object, only, overlay
from tests.integration.deploy.server import apply
from tests.integration.deploy.test_chart import charted
from tests.support.admission import Pair


RELEASE = {"release": "kube-prometheus-stack"}
"""The label by which kube-prometheus-stack selects monitors and rules."""
MODULE = "github.com/prometheus-operator/prometheus-operator"
JOB = f"podMonitor/{NAMESPACE}/{NAME}/0"
CONTROL = f"podMonitor/{NAMESPACE}/control/0"


def operator_crds() -> list[Object]:
    """The operator's CRDs, from its own module."""
    command = ["go", "list", "-m", "-f", "{{.Dir}}", MODULE]
    place = ROOT / "tests/tools/prometheus-3.15"
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=place)
    folder = Path(done.stdout.strip()) / "jsonnet/prometheus-operator"
    return [json.loads(path.read_bytes()) for path in sorted(folder.glob("*-crd.json"))]


def prometheus() -> Object:
    """A Prometheus that selects in every namespace, as kube-prometheus-stack's does."""
    selector = {"matchLabels": RELEASE}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": "stack", "namespace": "default"},
        "spec": {
            "podMonitorSelector": selector,
            "podMonitorNamespaceSelector": {},
            "ruleSelector": selector,
            "ruleNamespaceSelector": {},
        },
    }


def control() -> Object:
    """A PodMonitor that is always selected: once it appears, the operator has checked the rest."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "control", "namespace": NAMESPACE, "labels": RELEASE},
        "spec": {"selector": {}, "podMetricsEndpoints": [{"port": "metrics"}]},
    }


def secrets(pair: Pair) -> list[Object]:
    """The Secrets that our monitors name."""
    data = {f"{NAME}-scraper": {"token": "t"}, TLS_SECRET: {"ca.crt": pair.authority.read_text()}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "stringData": texts,
        }
        for name, texts in data.items()
    ]


@pytest.fixture(scope="module")
async def operated(
    tmp_path_factory: pytest.TempPathFactory, pair: Pair
) -> AsyncIterator[RealCluster]:
    """A cluster with the operator, a Prometheus, and the Secrets that our monitors name."""
    directory = tmp_path_factory.mktemp("operated")
    async with RealCluster(directory) as cluster:
        async with asyncio.TaskGroup() as group:
            for crd in operator_crds():
                group.create_task(cluster.admin.create(CRDS, crd))

        async def made() -> bool:
            try:
                await apply(cluster.admin, [prometheus()])
            except KeyError:  # the kind is not served yet
                return False
            except ApiError as error:  # none of the operator's kinds is served yet
                if error.code == 404:
                    return False
                raise
            return True

        await poll(made, what="the operator's kinds served")
        await cluster.namespace(NAMESPACE)
        await apply(cluster.admin, secrets(pair))
        operator = cluster.certified("operator", "system:masters")
        assert operator.certificate is not None
        command = [
            str(find_binary("prometheus-operator")),
            f"--apiserver={cluster.api.url}",
            f"--cert-file={operator.certificate}",
            f"--key-file={operator.certificate.with_suffix('.key')}",
            f"--ca-file={operator.authority}",
            f"--web.listen-address=127.0.0.1:{free_port()}",
        ]
        process = Process(command, directory / "operator.log")
        process.start()
        try:
            yield cluster
        finally:
            process.kill()


async def configuration(cluster: RealCluster) -> tuple[set[str], str]:
    """The scrape jobs and the rules of the operator's Prometheus."""
    path = "/api/v1/namespaces/default"
    try:
        secret = await cluster.admin.request("GET", f"{path}/secrets/prometheus-stack")
        rules = await cluster.admin.request(
            "GET", f"{path}/configmaps/prometheus-stack-rulefiles-0"
        )
    except ApiError:
        return set(), ""
    text = gzip.decompress(base64.b64decode(secret["data"]["prometheus.yaml.gz"]))
    jobs = {job["job_name"] for job in yaml.safe_load(text)["scrape_configs"]}
    return jobs, "\n".join((rules.get("data") or {}).values())


def by_helm(labels: Object) -> tuple[Object, ...]:
    """Our chart's monitors and rules."""
    chosen = {"enabled": True, "additionalLabels": labels}
    return charted({"podMonitor": chosen, "prometheusRule": chosen})


def by_kustomize(labels: Object) -> tuple[Object, ...]:
    """The overlay's monitors and rules, with the documented label."""
    more = {"labels": [{"pairs": labels}]} if labels else {}
    return overlay(more, resources=["overlays/monitoring"])


@pytest.mark.parametrize("made", [by_helm, by_kustomize])
@pytest.mark.parametrize(("labels", "jobs"), [({}, {CONTROL}), (RELEASE, {CONTROL, JOB})])
async def test_the_operator_selects_them_by_the_label(
    operated: RealCluster,
    made: Callable[[Object], tuple[Object, ...]],
    labels: Object,
    jobs: set[str],
) -> None:
    """The operator selects monitors and rules with the label, and none without."""
    objects = made(labels)
    ours = [only(objects, kind) for kind in ("PodMonitor", "PrometheusRule")]
    await apply(operated.admin, [*ours, control()])

    async def written() -> bool:
        configured, rules = await configuration(operated)
        return configured == jobs and ("KubeVirtEvacuationStuck" in rules) == bool(labels)

    await poll(written, what=f"{jobs} in the configuration")
