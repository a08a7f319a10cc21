"""docs/hold-evictions.md on a real API server: its commands, its certificate, its webhook."""

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from exporter.engine.facts.model import ReviewOutcome
from exporter.errors import Exit
from exporter.settings import AdmissionSettings, read_settings
from tests.cluster import PODS, VMIS, RealCluster, launcher_pod, poll
from tests.cluster.access import allow
from tests.cluster.objects import Object
from tests.cluster.resources import MUTATING_WEBHOOKS, SERVICE_ACCOUNTS, SERVICES
from tests.deploy.test_install import Reader, mounted, shell
from tests.deploy.test_install import commands as install_commands
from tests.generate.manifests import NAME, NAMESPACE, config_of, render
from tests.support.admission import Answer, Evictor, Pair, add_vm, admitting
from tests.support.documents import HOLD_EVICTIONS, bare, chapters, code_blocks
from tests.support.program import Program, program


OVERLAY = "overlays/admission"
ACCOUNT = "descheduler-sa"
POD = "virt-launcher-db1-x"


def commands(heading: str) -> list[str]:
    """The shell commands below a heading, in order."""
    blocks = code_blocks(chapters(HOLD_EVICTIONS)[heading], "bash")
    return [line for block in blocks for line in block.splitlines()]


def test_the_outcomes_are_the_program_s() -> None:
    """Each outcome of the program has its row in the page's table."""
    steps = chapters(HOLD_EVICTIONS)["Five steps"]
    rows = re.findall(r"^ *\| (`\w+`) \|", steps, re.MULTILINE)
    assert {bare(row) for row in rows} == set(ReviewOutcome)


def test_the_users_named_are_the_shipped_ones() -> None:
    """The shipped list has all users that the page names."""
    listed = chapters(HOLD_EVICTIONS)["Which users to list"]
    named = re.findall(r"`(system:serviceaccount:[^`A-Z]+)`", listed)
    shipped = read_settings(config_of(render(OVERLAY))).admission.users
    assert named
    assert set(named) <= set(shipped)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """A control plane with the VM shop/db1, which has just been migrated."""
    async with RealCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await cluster.namespace("shop")
        await add_vm(cluster.admin, "shop", "db1", held=True)
        yield cluster


@asynccontextmanager
async def exporter(
    cluster: RealCluster, directory: Path, pair: Pair, *, mode: str
) -> AsyncIterator[Program]:
    """The exporter with the overlay's admission settings, on the Service's port and certificate."""
    shipped = config_of(render(OVERLAY))
    config = admitting(pair, mode, port=int(shipped["listen"]["admission"].rpartition(":")[2]))
    config["admission"] = shipped["admission"] | {"mode": mode}
    login = ("--kubeconfig", str(cluster.kubeconfig(cluster.exporter)))
    async with program(directory, *login, config=config) as running:
        await running.ready()
        await running.until_verdict("shop", "db1", "preEviction", "cooldown")
        yield running


async def test_the_page_from_its_beginning_to_its_end(cluster: RealCluster, tmp_path: Path) -> None:
    """All commands of the page work: certificate, install, warn, enforce, exception, off.

    The API server calls the webhook by the Service's name, and verifies the certificate for that
    name. The Service leads to this machine instead of a pod.
    """
    admin, reader = cluster.admin, Reader(cluster, tmp_path)
    for command in install_commands("A certificate first"):
        await reader.type(command)
    secret = await admin.request("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}-tls")
    pair = mounted(secret, tmp_path / "mounted")
    install, status, trust, look, again, waited = commands("Five steps")
    assert (install, status) == (again, waited)
    for command in (install, status, trust):
        await reader.type(command)
    webhook = await admin.get(MUTATING_WEBHOOKS, None, NAME)
    assert webhook["webhooks"][0]["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
    await _point_here(cluster)

    account: Object = {"metadata": {"name": ACCOUNT, "namespace": "kube-system"}}
    await admin.create(SERVICE_ACCOUNTS, account)
    async with _descheduler(cluster) as descheduler:
        pod = await _name_pod(cluster)
        async with exporter(cluster, tmp_path, pair, mode="warn") as running:

            async def is_warned() -> Answer | None:
                answer = await descheduler.evict(pod, dry_run=True)
                return answer if "Warning" in answer.headers else None

            warned = await poll(is_warned, within=20, what="the webhook called")
            assert warned.code == 201
            assert "VMI shop/db1: cooldown until" in warned.headers["Warning"]
            assert (await descheduler.evict(pod, query=True)).code == 201
            assert (await descheduler.evict(pod)).code == 201
            assert f'"event": "{look.rpartition(" ")[2]}"' in running.output

        await reader.type(again)
        patched = await admin.get(MUTATING_WEBHOOKS, None, NAME)
        assert patched["webhooks"][0]["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
        await _point_here(cluster)
        pod = await _name_pod(cluster)
        async with exporter(cluster, tmp_path, pair, mode="enforce") as running:
            denied = await descheduler.evict(pod)
            assert denied.code == 429
            (explain,) = commands("What an evictor shows")
            printed = await shell(
                explain.replace("python ", f"{sys.executable} ").replace(
                    "bank/churn-1", "shop/db1"
                ),
                KUBEVIRT_EVICTION_EXPORTER_URL=running.query,
            )
            assert f"by system:serviceaccount:kube-system:{ACCOUNT}" in printed
            (through,) = commands("Let one eviction through")
            await reader.type(through)
            pod = await _name_pod(cluster)
            (off,) = commands("Switch it off")
            await reader.type(off)

            async def is_off() -> bool:
                return (await descheduler.evict(pod, dry_run=True)).code == 201

            await poll(is_off, within=20, what="the webhook switched off")
            assert await running.end() == Exit.OK


def test_the_default_is_to_hold_nobody() -> None:
    """By default there is no webhook listener, and no user is listed."""
    assert AdmissionSettings().users == ()
    assert read_settings({}).listen.admission == ()


@asynccontextmanager
async def _descheduler(cluster: RealCluster) -> AsyncIterator[Evictor]:
    """A client with the descheduler's service account."""
    user = await cluster.account("kube-system", ACCOUNT)
    evicts = {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}
    await allow(cluster.admin, user, "descheduler-evicts", evicts)
    async with Evictor.opened(cluster, user, "shop") as evictor:
        yield evictor


async def _point_here(cluster: RealCluster) -> None:
    """Point the Service to this machine, because there are no pods and no kube-proxy."""
    await cluster.admin.delete(SERVICES, NAMESPACE, NAME)
    spec = {"type": "ExternalName", "externalName": "127.0.0.1"}
    place = {"name": NAME, "namespace": NAMESPACE}
    await cluster.admin.create(SERVICES, {"metadata": place, "spec": spec})


async def _name_pod(cluster: RealCluster) -> str:
    """Recreate db1's launcher pod with the page's name."""
    await cluster.admin.send(
        "DELETE",
        PODS.path("shop"),
        json={"gracePeriodSeconds": 0, "propagationPolicy": "Background"},
    )

    async def none_left() -> bool:
        return not (await cluster.admin.list(PODS, "shop"))["items"]

    await poll(none_left, within=20, what="no pod")
    vmi = await cluster.admin.get(VMIS, "shop", "db1")
    made = launcher_pod(vmi, metadata={"name": POD})
    del made["metadata"]["generateName"]
    await cluster.admin.create(PODS, made)
    return POD
