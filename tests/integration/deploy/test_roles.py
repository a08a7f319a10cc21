"""A real API server accepts every rendered object, and the roles are exactly sufficient."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster import VMIS, ApiError, Client, RealCluster, poll, vmi
from tests.cluster.resources import PODS, SERVICE_ACCOUNTS
from tests.generate.manifests import (
    ADDITIONS,
    NAME,
    NAMESPACE,
    OVERLAYS,
    PLAIN,
    Object,
    only,
    pod_templates,
    render,
    render_chart,
)
from tests.integration.deploy.schemas import find_faults
from tests.integration.deploy.secured import installed, somebody
from tests.integration.deploy.server import Grants, account, applied, granted
from tests.support.admission import Pair
from tests.support.documents import ROOT
from tests.support.lives import ended_state
from tests.support.program import program


RENDERED = (*OVERLAYS, *ADDITIONS, "chart")
READS = {
    ("", "nodes"),
    ("", "pods"),
    ("policy", "poddisruptionbudgets"),
    ("kubevirt.io", "kubevirts"),
    ("kubevirt.io", "virtualmachineinstancemigrations"),
    ("kubevirt.io", "virtualmachineinstances"),
}
REVIEWS = {
    ("create", "authentication.k8s.io", "tokenreviews", ""),
    ("create", "authorization.k8s.io", "subjectaccessreviews", ""),
}
SCRAPER = f"{NAME}-scraper"
OPTIONAL = (
    "pods",
    "kubevirts",
    "nodes",
    "poddisruptionbudgets",
    "virtualmachineinstancemigrations",
)
RESTRICTED_V2 = ROOT / "tests/support/restricted_v2.yaml"


def rendered(name: str) -> tuple[Object, ...]:
    """The objects of a folder, or those of the descheduler's chart with our values."""
    return render_chart() if name == "chart" else render(name)


async def test_kubeconform_finds_no_fault(cluster: RealCluster, tmp_path: Path) -> None:
    """Every object matches this API server's schemas, and a wrong one does not."""
    openapi = await cluster.admin.request("GET", "/openapi/v2")
    objects = [document for folder in RENDERED for document in rendered(folder)]
    report = find_faults(objects, openapi, tmp_path)
    misspelt = {**only(render("overlays/standalone"), "Service"), "spec": {"prots": []}}
    wrong = find_faults([misspelt], openapi, tmp_path)

    assert report["summary"] == {"valid": len(objects), "invalid": 0, "errors": 0, "skipped": 0}
    assert wrong["summary"]["invalid"] == 1


@pytest.mark.parametrize("folder", [*OVERLAYS, "chart"])
async def test_every_pod_is_restricted(cluster: RealCluster, folder: str) -> None:
    """All pods are accepted under the enforced pod security standard `restricted`."""
    (template,) = pod_templates(rendered(folder))

    await try_pod(cluster.admin, template)


async def test_a_pod_that_is_not_restricted_is_not_made(cluster: RealCluster) -> None:
    """The API server refuses a pod that violates the standard of the namespace."""
    template = pod_templates(render("base"))[0]
    privileged = json.loads(json.dumps(template).replace('"runAsNonRoot": true', '"fsGroup": 1'))

    with pytest.raises(ApiError, match=r"violates PodSecurity .restricted:latest."):
        await try_pod(cluster.admin, privileged)


async def test_openshift_s_pod_fits_restricted_v2(cluster: RealCluster) -> None:
    """OpenShift's SCC may choose user and group of our pod; it would refuse a pod with its own."""
    (template,) = pod_templates(render("overlays/openshift"))
    policies = list(yaml.safe_load_all(RESTRICTED_V2.read_text(encoding="utf-8")))

    async def refuses(own: Object, text: str) -> bool:
        """Whether the API server refuses the pod with more in its security context."""
        wrong = copy.deepcopy(template)
        wrong["spec"]["securityContext"] |= own
        try:
            await try_pod(cluster.admin, wrong)
        except ApiError as error:
            return f"restricted-v2: {text}" in str(error)
        return False

    levels = {"seLinuxOptions": {"level": "s0"}}, "no SELinux options of its own"
    profile = {"seccompProfile": {"type": "Localhost", "localhostProfile": "ours.json"}}
    async with applied(cluster.admin, policies):
        await poll(lambda: refuses(*levels), what="both policies in force")
        made = await try_pod(cluster.admin, template)
        assert await refuses({"runAsUser": 65532}, "only a user of the namespace's range")
        assert await refuses({"fsGroup": 65532}, "only the namespace's fsGroup")
        assert await refuses(profile, "only the seccomp profile RuntimeDefault")

    async def ended() -> bool:
        return not await refuses(*levels)

    await poll(ended, what="no policy in force")
    assert template["metadata"]["annotations"]["openshift.io/required-scc"] == "restricted-v2"
    assert made["spec"]["securityContext"]["runAsUser"] == 1000680000


async def try_pod(client: Client, template: Object) -> Object:
    """The pod that the API server would make of a Deployment's template."""
    metadata = {**template["metadata"], "namespace": NAMESPACE, "generateName": f"{NAME}-"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    path = PODS.path(NAMESPACE)
    made: Object = await client.request("POST", path, params={"dryRun": "All"}, json=pod)
    return made


@pytest.mark.parametrize("folder", ["base", "overlays/sidecar"])
async def test_the_exporter_runs_under_its_roles(
    cluster: RealCluster, folder: str, pair: Pair, tmp_path: Path
) -> None:
    """With its account and configuration the exporter reads everything without a 403."""
    async with (
        somebody(cluster, "scraper", SCRAPER) as token,
        installed(cluster, tmp_path, pair, folder) as nobody,
    ):
        prometheus, exporter = nobody.with_token(token), nobody.exporter
        assert await prometheus.sample("kubevirt_eviction_exporter_synced") >= len(READS)
        assert await prometheus.sample("kubevirt_eviction_exporter_permission_missing") == 0
        assert "denied" not in {event.get("kind") for event in exporter.events("watch_broke")}
        (started,) = exporter.events("started")
        assert started["history"].endswith("/history")
        assert await exporter.end() == 0


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_every_verb_is_needed(
    cluster: RealCluster, paging: RealCluster, verb: str, tmp_path: Path
) -> None:
    """Without a verb on VMIs the exporter exits; for other resources it reports the missing verb.

    If the API server has streaming lists, the exporter needs only `watch`.
    """
    server = paging if verb == "list" else cluster
    async with account(server, "base", without=(verb, OPTIONAL)) as user:
        kubeconfig = str(server.kubeconfig(user))
        async with program(tmp_path, "--kubeconfig", kubeconfig) as exporter:
            await exporter.ready()
            missing = "kubevirt_eviction_exporter_permission_missing"

            async def find_missing() -> bool:
                seen = {
                    resource: await exporter.sample(missing, resource=resource)
                    for _, resource in READS
                }
                return seen == {resource: float(resource in OPTIONAL) for _, resource in READS}

            # The exporter may be ready before it knows whether it may read nodes and budgets.
            await poll(find_missing, what="every optional resource missing")

    config = {"kube": {"syncTimeout": "2s"}}
    async with account(server, "base", without=(verb, ("virtualmachineinstances",))) as user:
        kubeconfig = str(server.kubeconfig(user))
        async with program(tmp_path, "--kubeconfig", kubeconfig, config=config) as exporter:
            assert await asyncio.wait_for(exporter.process.wait(), 30) == 3


@pytest.mark.parametrize(("folder", "reviews"), [("overlays/standalone", REVIEWS), (PLAIN, set())])
async def test_nothing_more_is_allowed(cluster: RealCluster, folder: str, reviews: Grants) -> None:
    """The account may only read, and review callers."""
    other = {"metadata": {"name": "other", "namespace": NAMESPACE}}
    await cluster.admin.create(SERVICE_ACCOUNTS, other)
    nobody = await cluster.account(NAMESPACE, "other")
    async with (
        account(cluster, folder) as user,
        cluster.client(user) as client,
        cluster.client(nobody) as without,
    ):
        more = await granted(client) - await granted(without)
    await cluster.admin.delete(SERVICE_ACCOUNTS, NAMESPACE, "other")

    reads = {(verb, *resource, "") for verb in ("list", "watch") for resource in READS}
    assert more == reads | reviews


@asynccontextmanager
async def migrated_vm(client: Client) -> AsyncIterator[None]:
    """A VM that has just been migrated, so that it cools down."""
    state = ended_state("m", time.time() - 60, time.time() - 30)
    await client.create(VMIS, vmi("moved", status={"migrationState": state}))
    try:
        yield
    finally:
        await client.delete(VMIS, "default", "moved")
