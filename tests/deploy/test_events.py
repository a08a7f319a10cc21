"""`deploy/components/events` adds one verb, with which the exporter writes Events."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cluster import VMIS, RealCluster, find_binary, poll
from tests.cluster.resources import EVENTS
from tests.deploy.server import account, applied, granted
from tests.deploy.test_admission import migrated_vm
from tests.generate.manifests import render
from tests.support.program import program


VERBS = ("create", "update", "patch", "delete", "get", "list", "watch")
KINDS = ("events.events.k8s.io", "events")


def can_i(kubeconfig: Path) -> dict[tuple[str, str], str]:
    """The answer of `kubectl auth can-i` about Events in another namespace."""
    asked = [(verb, kind) for kind in KINDS for verb in VERBS] + [("*", "*")]
    command = [str(find_binary("kubectl")), "--kubeconfig", str(kubeconfig), "-n", "default"]
    return {
        one: subprocess.run(
            [*command, "auth", "can-i", *one], check=False, capture_output=True, text=True
        ).stdout.strip()
        for one in asked
    }


async def test_one_verb_is_added(
    cluster: RealCluster, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """The component adds only the verb `create` on Events, which is enough to write them."""
    async with account(cluster, "base") as user, cluster.client(user) as client:
        kubeconfig = cluster.kubeconfig(user)
        before, asked_before = await granted(client), can_i(kubeconfig)
        async with applied(cluster.admin, render("components/events")):

            async def in_force() -> bool:
                return await granted(client) != before

            await poll(in_force, what="the role in force")
            more, asked_after = await granted(client) - before, can_i(kubeconfig)
            arguments = ("--kubeconfig", str(kubeconfig))
            async with (
                migrated_vm(cluster.admin),
                program(tmp_path, *arguments, config={"events": True}) as exporter,
            ):
                await exporter.ready()
                await exporter.until_verdict("default", "moved", "preEviction", "cooldown")
                await exporter.verdict("default", "moved")

                async def written() -> list[object]:
                    return [
                        one["involvedObject"]["kind"]
                        for one in (await cluster.admin.list(EVENTS, "default"))["items"]
                        if one["reason"] == "EvictionBlocked"
                    ]

                assert await poll(written, what="an Event") == [VMIS.kind]

    for (verb, kind), answer in asked_before.items():
        prove(f"kubectl auth can-i {verb} {kind}: {answer}, then {asked_after[verb, kind]}")
    assert more == {("create", "events.k8s.io", "events", "")}
    assert set(asked_before.values()) == {"no"}
    changed = {one for one, answer in asked_after.items() if answer != asked_before[one]}
    assert changed == {("create", "events.events.k8s.io")}
