"""`deploy/components/eviction-requests` adds what the exporter needs to answer EvictionRequests."""

from tests.cluster import PODS, RealCluster, poll
from tests.generate.manifests import NAME, render
from tests.integration.deploy.server import account, applied, granted


async def test_what_answers_need(cluster: RealCluster) -> None:
    """Permissions and a Lease. Without the feature gate, launcher pods are made as before."""
    async with account(cluster, "base") as user, cluster.client(user) as client:
        before = await granted(client)
        async with applied(cluster.admin, render("components/eviction-requests")):

            async def is_in_force() -> bool:
                return await granted(client) != before

            await poll(is_in_force, what="the role in force")
            more = await granted(client) - before
            pod = await cluster.admin.create(
                PODS,
                {
                    "metadata": {
                        "namespace": "default",
                        "name": "virt-launcher-db1",
                        "labels": {"kubevirt.io": "virt-launcher"},
                    },
                    "spec": {"containers": [{"name": "compute", "image": "launcher"}]},
                },
            )
            await cluster.admin.delete(PODS, "default", "virt-launcher-db1")

    leases = {(verb, "coordination.k8s.io", "leases", NAME) for verb in ("get", "create", "update")}
    assert more == {
        ("list", "lifecycle.k8s.io", "evictions", ""),
        ("watch", "lifecycle.k8s.io", "evictions", ""),
        ("patch", "lifecycle.k8s.io", "evictions/status", ""),
        ("create", "", "pods/eviction", ""),
        *leases,
    }
    assert "evictionResponders" not in pod["spec"]
