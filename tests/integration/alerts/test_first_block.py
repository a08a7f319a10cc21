"""A real Prometheus sees the first blocked eviction of a VM."""

from collections.abc import Callable
from pathlib import Path

from tests.cluster import VMIS, poll, vmi
from tests.cluster.users import open_kubeconfig
from tests.integration.alerts.live import Prometheus
from tests.support.api_servers import SimulatedStage
from tests.support.history_files import migrate
from tests.support.program import program


BLOCKS = "descheduler_kubevirt_eviction_blocks_total"


async def test_increase_sees_the_first_block(
    simulated: SimulatedStage, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """`increase` of a counter that was scraped at 0 has the first block of each VM."""
    namespace = await simulated.make_namespace()
    login = str(open_kubeconfig(tmp_path / "login", simulated.url))
    names = [f"db{number}" for number in range(5)]
    for number, name in enumerate(names):
        await simulated.admin.create(VMIS, vmi(name, namespace, node=f"n{number}"))
        await migrate(simulated.admin, namespace, name, ago=[60.0])
    async with program(tmp_path, "--kubeconfig", login) as exporter:
        await exporter.ready()
        targets = [{"targets": [exporter.metrics.removeprefix("http://")]}]
        async with Prometheus(tmp_path, {"groups": []}, targets=targets) as server:

            async def count(query: str) -> float:
                answer = await server.ask("query", query=query)
                return float(answer["result"][0]["value"][1]) if answer["result"] else 0.0

            async def is_scraped() -> bool:
                return await count(f"count({BLOCKS} == 0)") == len(names)

            await poll(is_scraped, what="the counters at 0")
            for name in names:
                assert (await exporter.verdict(namespace, name))["reason"] == "cooldown"

            async def is_seen() -> bool:
                return await count(f"count(increase({BLOCKS}[5m]) > 0)") == len(names)

            await poll(is_seen, what="an increase of each counter")
            seen = await count(f"sum(max_over_time({BLOCKS}[5m]) - min_over_time({BLOCKS}[5m]))")
    prove(f"Prometheus: {seen:g} of {len(names)} first blocks are an increase")
    assert seen == len(names)
