"""Each documented way to install is tried in another namespace, until the exporter answers.

The API server is real; the kubelet, cert-manager and the controllers are simulated. The exporter
runs as a process of the test, with the account, the roles and the configuration that the typed
lines have created.
"""

import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster import VMIS, RealCluster, vmi
from tests.generate.manifests import (
    DEPLOY,
    ELSEWHERE,
    NAME,
    NAMESPACE,
    Object,
    config_of,
    localize,
    write_overlay,
)
from tests.integration.deploy.secured import Caller, playable, trust
from tests.integration.deploy.server import apply, delete
from tests.integration.deploy.test_install import (
    OWN_OVERLAY,
    UNINSTALL,
    UPGRADE,
    Reader,
    commands,
    fenced,
    shell,
)
from tests.support.admission import Pair
from tests.support.documents import README, bare, chapters, code_blocks, table, ways_to_install
from tests.support.lives import ended_state
from tests.support.program import program


WAYS = ways_to_install()
TRIED = [way for way in WAYS if "Helm" not in way or way.startswith(("Metrics", "Sidecar"))]
"""The ways to try: test_chart.py shows that Helm makes the objects of kustomize."""
PICKED = {picked: bare(value) for picked, _, value in table(README, "Pick one of three")}
"""The choices of the README, each with its value of the chart."""
KINDS = (
    "deployment,service,networkpolicy,poddisruptionbudget,configmap,secret,serviceaccount,role,"
    "rolebinding,clusterrole,clusterrolebinding,certificate,issuer,podmonitor,prometheusrule"
)
LABEL = f"app.kubernetes.io/name={NAME}"


@pytest.fixture(scope="module")
async def busy(fresh: RealCluster) -> AsyncIterator[RealCluster]:
    """A cluster with a VM that has just been migrated, and a running descheduler."""
    await fresh.namespace("shop")
    ended = ended_state("m", time.time() - 60, time.time() - 30)
    await fresh.admin.create(VMIS, vmi("db1", "shop", status={"migrationState": ended}))
    labels = {"app": "descheduler"}
    pod = {"containers": [{"name": "descheduler", "image": "descheduler"}]}
    stock: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "descheduler", "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    await apply(fresh.admin, [stock])
    yield fresh
    await delete(fresh.admin, [stock])


def follow_readme(picked: str) -> list[str]:
    """The commands of one of the README's ways to install, without those that push images."""
    (block,) = code_blocks(chapters(README)["Pick one of three"], "bash")
    *images, install, wait, ask = block.splitlines()
    assert all(line.startswith("podman build ") for line in images)
    command, value = install.rsplit(" ", 1)
    assert value in PICKED.values()
    return [f"{command} {PICKED[picked]}", wait, ask]


class Adopter:
    """A user who types the lines of one way, for the default or another namespace."""

    def __init__(self, cluster: RealCluster, directory: Path, pair: Pair, namespace: str) -> None:
        self._cluster = cluster
        self._directory = directory
        self._pair = pair
        self._namespace = namespace
        self._reader = Reader(cluster, directory)

    def lines(self, way: str) -> list[str]:
        """The typed lines; kustomize in another namespace needs an overlay."""
        lines = WAYS[way]
        applied = [line for line in lines if line.startswith("kubectl apply ")]
        if self._namespace != NAMESPACE and applied:
            place = self._directory / "own"
            place.mkdir()
            mode = applied[0].rpartition(" deploy/")[2]
            own, folders = localize(yaml.safe_load(fenced(OWN_OVERLAY, "yaml")[0]))
            assert own["namespace"] == ELSEWHERE
            assert folders["resources"].pop(0) == "overlays/sidecar"
            write_overlay(place, own, **{**folders, "resources": [mode, *folders["resources"]]})
            begun = DEPLOY / ("components/admission" if mode == "overlays/admission" else mode)
            (place / "config.yaml").write_bytes((begun / "config.yaml").read_bytes())
            (typed,) = commands(OWN_OVERLAY)
            first = typed.replace(" -k .", f" -k {shlex.quote(str(place))}")
            lines = [first if line == applied[0] else line for line in lines]
            lines = [line for line in lines if line not in applied]
        return [self.moved(line) for line in lines]

    def moved(self, line: str) -> str:
        """A line of the documents with the namespace replaced."""
        named = rf"(?<=-n ){NAMESPACE}|(?<=--namespace ){NAMESPACE}|(?<=serviceaccount=){NAMESPACE}"
        return re.sub(named, self._namespace, line)

    async def type(self, line: str) -> str:
        """Type a line; returns what it prints."""
        if " exec " in line:
            return await self._exec(line.partition(" -- ")[2])
        return await self._reader.type(line)

    async def _exec(self, command: str) -> str:
        """Run a command as in the exporter's container; returns what it prints."""
        place = f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{NAME}"
        deployment = await self._cluster.admin.request("GET", place)
        (volume,) = (
            volume["configMap"]["name"]
            for volume in deployment["spec"]["template"]["spec"]["volumes"]
            if volume["name"] == "config"
        )
        maps = f"/api/v1/namespaces/{self._namespace}/configmaps"
        mounted = await self._cluster.admin.request("GET", f"{maps}/{volume}")
        mounted["kind"], mounted["metadata"]["name"] = "ConfigMap", f"{NAME}-config"
        user = await self._cluster.account(self._namespace, NAME)
        config = playable(config_of((mounted,)), self._pair)
        config["listen"] = {**config["listen"], "local": f"unix:{self._directory}/local.sock"}
        async with program(
            self._directory,
            *("--kubeconfig", str(self._cluster.kubeconfig(user))),
            config=config,
        ) as exporter:
            await Caller(exporter, trust(self._pair)).ready()
            return await shell(
                command.replace("python ", f"{sys.executable} "),
                KUBEVIRT_EVICTION_EXPORTER_URL=config["listen"]["local"],
            )


@pytest.mark.parametrize("way", TRIED)
async def test_the_typed_lines_end_in_verdicts(
    busy: RealCluster,
    pair: Pair,
    tmp_path: Path,
    *,
    way: str,
    prove: Callable[[str], None],
) -> None:
    """After the typed lines the exporter answers; uninstalling leaves no labelled object.

    tests/e2e/test_install.py types them for the default namespace. In another one, the overlay of
    one's own adds a certificate, which plain metrics do not need.
    """
    namespace = NAMESPACE if way.startswith("Plain") else ELSEWHERE
    adopter = Adopter(busy, tmp_path, pair, namespace)
    by_helm = way.endswith("Helm")
    lines = adopter.lines(way)
    began = time.monotonic()
    outputs = [await adopter.type(line) for line in lines]
    took = time.monotonic() - began

    assert "shop/db1" in outputs[-1]
    assert "cooldown" in outputs[-1]
    if by_helm:  # Helm's notes name the labels that Prometheus needs
        assert any("podMonitor.additionalLabels" in output for output in outputs)
    prove(f"{way}, in {namespace}: {len(lines)} lines typed, verdicts after {took:.1f} s")

    for line in commands(UPGRADE) if not by_helm else []:
        await adopter.type(adopter.moved(line))
    helm, *kubectl, everything = commands(UNINSTALL)
    assert (
        everything == f"kubectl delete namespace {NAMESPACE}"
    )  # no controller would empty the namespace here
    for line in [helm] if by_helm else kubectl:
        await adopter.type(adopter.moved(line))
    assert await adopter.type(f"kubectl get {KINDS} -A -l {LABEL} -o name") == ""


@pytest.mark.parametrize("picked", PICKED)
async def test_the_readme_s_lines_end_in_verdicts(
    busy: RealCluster, pair: Pair, tmp_path: Path, picked: str
) -> None:
    """Each way of the README ends in an answer, with only images that the README pushes."""
    adopter = Adopter(busy, tmp_path, pair, NAMESPACE)
    outputs = [await adopter.type(line) for line in follow_readme(picked)]
    images = await adopter.type(
        f"kubectl -n {NAMESPACE} get deployment {NAME} -o jsonpath='{{.spec.template.spec..image}}'"
    )
    pushed = re.findall(r"podman push (\S+)", chapters(README)["Pick one of three"])
    await adopter.type(commands(UNINSTALL)[0])

    assert "shop/db1" in outputs[-1]
    assert images
    assert set(images.split()) <= set(pushed)


async def test_helm_changes_the_mode_in_place(
    busy: RealCluster, pair: Pair, tmp_path: Path
) -> None:
    """Helm changes any mode into any other, and removes what the new mode does not have."""
    adopter = Adopter(busy, tmp_path, pair, NAMESPACE)
    (install, *_) = WAYS["Metrics, by Helm"]
    upgrade = install.replace("helm install", "helm upgrade --install")
    at = f"-n {NAMESPACE} -l {LABEL} -o name"
    for mode in ("metrics", "sidecar", "standalone", "sidecar", "metrics", "standalone", "metrics"):
        await adopter.type(upgrade.replace("mode=metrics", f"mode={mode}"))
        alone = await adopter.type(f"kubectl get poddisruptionbudget {at}")
        roles = await adopter.type(f"kubectl get role {at}")
        maps = await adopter.type(f"kubectl get configmap {at}")
        assert (NAME in alone) == (mode == "standalone")
        assert ("descheduler" in roles) == (mode == "sidecar")
        assert len(maps.split()) == (2 if mode == "sidecar" else 1)
    await adopter.type(commands(UNINSTALL)[0])
