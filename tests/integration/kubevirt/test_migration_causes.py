"""The line `migration_ended` of migrations that KubeVirt's own controllers end or abort."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster import poll
from tests.cluster.player import Fate
from tests.cluster.resources import VMIMS
from tests.cluster.rig import Rig
from tests.support.program import Program, program


REASON, MESSAGE = "error.type", "error.message"


@dataclass
class Stage:
    """The rig, and the exporter whose log is read."""

    rig: Rig
    exporter: Program

    async def until_line(self, namespace: str) -> dict[str, Any]:
        """Wait for the first line about a migration in a namespace."""

        async def find() -> dict[str, Any] | None:
            lines = self.exporter.events("migration_ended")
            return next((one for one in lines if one["k8s.namespace.name"] == namespace), None)

        return await poll(find, what=f"the end of a migration in {namespace}")

    async def delete_migration(self, namespace: str) -> None:
        """Delete the newest migration in a namespace, which aborts it."""
        scene = await self.rig.look(f"{namespace}/db1")
        await self.rig.cluster.admin.delete(VMIMS, namespace, scene.vmims[-1]["metadata"]["name"])


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """KubeVirt's servers, three nodes, and an exporter."""
    async with (
        Rig.opened() as rig,
        program(tmp_path_factory.mktemp("causes"), *rig.login) as exporter,
    ):
        await exporter.ready()
        yield Stage(rig, exporter)


@pytest.fixture
def quote(prove: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Print the important fields of a log line."""

    def show(line: dict[str, Any]) -> None:
        short = {
            key: value for key, value in line.items() if key.startswith(("error", "kubevirt."))
        }
        wanted = ("kubevirt.migration.phase", "kubevirt.migration.outcome", MESSAGE)
        said = ", ".join(f"{key.rpartition('.')[2]} {short[key]!r}" for key in wanted)
        prove(f"rig: migration_ended: {line[REASON]}: {said}")

    return show


@pytest.mark.parametrize(
    ("name", "fate", "reason", "message"),
    [
        pytest.param("none", "succeeds", "none", "", id="none"),
        pytest.param("libvirt", "fails", "libvirt", "virError", id="libvirt"),
        # No kubelet runs here, so nothing reports why the target's container ended.
        pytest.param("crashes", "crashes", "other", "", id="target-before-hand-off"),
        pytest.param(
            "lost", Fate("loses ready target", seconds=2), "target_lost", "", id="target-lost"
        ),
    ],
)
async def test_what_ends_by_itself(
    stage: Stage,
    quote: Callable[[dict[str, Any]], None],
    name: str,
    fate: Any,
    *,
    reason: str,
    message: str,
) -> None:
    """A migration that ends by itself has its reason in the log."""
    namespace = f"ended-{name}"
    async with stage.rig.vmi(f"{namespace}/db1", fate, "succeeds"):
        await stage.rig.evict(f"{namespace}/db1")
        line = await stage.until_line(namespace)
    quote(line)
    assert line[REASON] == reason
    assert message in line[MESSAGE]
    assert (line["kubevirt.migration.outcome"] == "succeeded") is (reason == "none")


async def test_an_aborted_migration(stage: Stage, quote: Callable[[dict[str, Any]], None]) -> None:
    """A VMIM that is deleted while its migration runs is logged as aborted."""
    async with stage.rig.vmi("ended-aborted/db1", "hangs", "succeeds"):
        await stage.rig.evict("ended-aborted/db1")
        await stage.rig.until("ended-aborted/db1", lambda scene: scene.state.get("startTimestamp"))
        await stage.delete_migration("ended-aborted")
        line = await stage.until_line("ended-aborted")
    quote(line)
    assert line[REASON] == "aborted"
