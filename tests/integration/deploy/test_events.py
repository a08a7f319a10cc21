"""`deploy/components/events` adds what the exporter needs to write Events."""

from pathlib import Path

from tests.cluster import VMIS, RealCluster, poll
from tests.cluster.resources import EVENTS
from tests.generate.manifests import NAME, render
from tests.integration.deploy.server import account, applied, granted
from tests.integration.deploy.test_roles import migrated_vm
from tests.support.program import program


async def test_what_events_need(cluster: RealCluster, tmp_path: Path) -> None:
    """The component adds `create` on Events, and a Lease that the exporter then holds."""
    async with account(cluster, "base") as user, cluster.client(user) as client:
        before = await granted(client)
        async with applied(cluster.admin, render("components/events")):

            async def in_force() -> bool:
                return await granted(client) != before

            await poll(in_force, what="the role in force")
            more = await granted(client) - before
            arguments = ("--kubeconfig", str(cluster.kubeconfig(user)))
            async with (
                migrated_vm(cluster.admin),
                program(tmp_path, *arguments, config={"events": True}) as exporter,
            ):
                await exporter.ready()
                await exporter.until_verdict("default", "moved", "preEviction", "cooldown")
                await exporter.verdict("default", "moved")

                async def written() -> list[object]:
                    return [
                        event["involvedObject"]["kind"]
                        for event in (await cluster.admin.list(EVENTS, "default"))["items"]
                        if event["reason"] == "EvictionBlocked"
                    ]

                assert await poll(written, what="an Event") == [VMIS.kind]

                async def is_held() -> bool:
                    return bool(exporter.events("lease_taken"))

                await poll(is_held, what="the Lease")

    leases = {(verb, "coordination.k8s.io", "leases", NAME) for verb in ("get", "create", "update")}
    assert more == {("create", "events.k8s.io", "events", ""), *leases}
