"""The steps of docs/hold-evictions.md, on a cluster with KubeVirt's own webhook."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.documents import CERTIFICATE, SECTIONS, commands
from tests.e2e.images import ROOT
from tests.e2e.kubevirt import KubeVirt
from tests.generate.manifests import NAME, NAMESPACE


DENIED = f"{NAME}: VMI shop/db1: cooldown"
EVICTOR = "system:serviceaccount:kube-system:descheduler-sa"


@pytest.mark.timeout(600)
async def test_five_steps(cluster: Cluster, kubevirt: KubeVirt, scratch: Path) -> None:
    """In mode `warn` KubeVirt evacuates; in mode `enforce` the same eviction is denied."""
    checkout = scratch / "checkout"
    for name in ("deploy", "alerts"):
        shutil.copytree(ROOT / name, checkout / name)
    let_evict(cluster)
    await kubevirt.just_moved()
    pod = (await kubevirt.pod())["metadata"]["name"]

    with cluster.terminal(scratch, checkout) as terminal:

        async def type_all(*lines: str) -> None:
            for line in lines:
                await asyncio.to_thread(terminal.type, line)

        async def evict_until(expected: str) -> None:
            """Evict repeatedly until the answer is as expected.

            KubeVirt evacuates the VM as long as the API server does not know the webhook, or a
            replica with the old mode still answers. The webhook allows evictions of a VM that is
            marked for evacuation, so each attempt cancels the evacuation.
            """
            answers = []
            try:
                async with asyncio.timeout(120):
                    while True:
                        answers.append(await asyncio.to_thread(try_evict, cluster, pod))
                        if expected in answers[-1]:
                            return
                        await kubevirt.calm()
            except TimeoutError as late:
                late.add_note(
                    f"{expected!r} not in {len(answers)} answers, the last {answers[-3:]}"
                )
                raise

        *install, logs, apply, status = commands(SECTIONS["Five steps"])
        await type_all(*commands(SECTIONS[CERTIFICATE]), *install)
        await evict_until("Warning: ")
        assert await kubevirt.is_marked()
        await type_all(logs)
        await kubevirt.calm()

        config = checkout / "deploy/components/admission/config.yaml"
        text = config.read_text()
        assert text.count("mode: warn") == 1
        config.write_text(text.replace("mode: warn", "mode: enforce"))
        await type_all(apply, status)
        await evict_until(DENIED)
        assert not await kubevirt.is_marked()

        (explain,) = commands(SECTIONS["What an evictor shows"])
        explain = explain.replace("bank/churn-1", "shop/db1")

        def explanations() -> str:
            """What each of the replicas explains: only one of them has judged the eviction."""
            named = [pod["metadata"]["name"] for pod in cluster.pods()]
            inside = ("-c", "exporter", "--", *explain.split())
            outputs = [cluster.kubectl("-n", NAMESPACE, "exec", pod, *inside) for pod in named]
            return "".join(outputs)

        assert f"by {EVICTOR}" in await asyncio.to_thread(explanations)

        (through,) = commands(SECTIONS["Let one eviction through"])
        refused = await asyncio.to_thread(
            terminal.type_unlisted, through.replace("virt-launcher-db1-x", pod) + " 2>&1 || true"
        )
        assert "Eviction triggered evacuation" in refused
        await type_all(*commands(SECTIONS["Switch it off"]))
    await kubevirt.calm()
    cluster.remove()


def let_evict(cluster: Cluster) -> None:
    """Let the listed user evict pods."""
    for made in (
        ("clusterrole", "evictor", "--verb=create", "--resource=pods/eviction"),
        ("clusterrolebinding", "evictor", "--clusterrole=evictor", f"--user={EVICTOR}"),
    ):
        dry = cluster.kubectl("create", *made, "--dry-run=client", "-o", "json")
        cluster.apply([json.loads(dry)])


def try_evict(cluster: Cluster, pod: str) -> str:
    """Evict a pod as a listed user; returns what kubectl prints."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "shop"},
    }
    path = f"/api/v1/namespaces/shop/pods/{pod}/eviction"
    asked = ("create", "--raw", path, "-f", "-", f"--as={EVICTOR}")
    ended = cluster.try_kubectl(*asked, given=json.dumps(eviction))
    return ended.stdout + ended.stderr
