"""Every command of every runbook runs as written, with KubeVirt's own controllers.

The launcher pods run, but there are no real VMs in them.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from exporter.demo import objects
from tests.cluster import poll
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.documents import CERTIFICATE, type_section
from tests.e2e.kubevirt import KubeVirt
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAMESPACE
from tests.integration.alerts.test_runbooks import EVERY_COMMAND, TEXTS, commands, needs_add_on
from tests.support.kubectl_plugin import write_plugin


STUCK = "KubeVirtEvacuationStuck"
EXAMPLE = "kubevirt-evacuation-x1x1x"
"""The example name, which a reader replaces by the name of the migration attempt."""
OURS = {"NAMESPACE=bank NAME=churn-1": "NAMESPACE=shop NAME=db1", "NODE=node-1": "NODE=n1"}
"""The exports for this cluster, instead of the runbooks' examples for the demo."""


@pytest.fixture(scope="module")
def terminal(cluster: Cluster, scratch: Path) -> Iterator[Terminal]:
    """The shell of a user with the certificate."""
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
        yield terminal
    cluster.remove()


@pytest.fixture(scope="module")
def typed() -> set[str]:
    """The commands of the runbooks that were run."""
    return set()


@pytest.mark.timeout(600)
async def test_the_commands_run_in_a_cluster(
    cluster: Cluster, kubevirt: KubeVirt, terminal: Terminal, typed: set[str], tmp_path: Path
) -> None:
    """Every command runs, with two replicas whose query listener needs a token."""
    write_plugin(tmp_path)
    await asyncio.to_thread(type_section, terminal, "Standalone, by kustomize")
    terminal.type_unlisted("kubectl apply --server-side -k deploy/overlays/monitoring")
    for name, text in TEXTS.items():
        attempt = await make_stuck(kubevirt) if name == STUCK else EXAMPLE
        with cluster.terminal(Path(terminal.type_unlisted("echo $TMPDIR").strip())) as shell:
            shell.type_unlisted(f'export PATH="{tmp_path}:$PATH"')
            for command in typed_once(commands(text)):
                line = command.replace(EXAMPLE, attempt)
                for example, own in OURS.items():
                    line = line.replace(example, own)
                if line.startswith("kubectl taint "):
                    shell.type_unlisted('kubectl taint nodes "$NODE" kubevirt.io/drain=:NoSchedule')
                if line.startswith("kubectl evictions node "):
                    # The cluster has one node, so its VM cannot leave it: exit 12.
                    line += " || test $? = 12"
                await asyncio.to_thread(shell.type, line)
                typed.add(command)
                if "rollout restart" in line:
                    await asyncio.to_thread(cluster.rolled_out)
                    await asyncio.to_thread(wait_for, lambda: are_two(cluster), "no old pod")
        if name == STUCK:
            assert not await kubevirt.is_marked()
        await kubevirt.calm()


def are_two(cluster: Cluster) -> bool:
    """Whether the pods before a restart are gone; `kubectl logs -l` fails if one goes meanwhile."""
    return len(cluster.get("-n", NAMESPACE, "pods")["items"]) == 2


def typed_once(lines: Sequence[str]) -> list[str]:
    """The commands that can run here, each once."""
    last = [line for place, line in enumerate(lines, 1) if line not in lines[place:]]
    return [line for line in last if not needs_add_on(line)]


def test_none_was_left_out(typed: set[str], prove: Callable[[str], None]) -> None:
    """All commands were run, except those that need an add-on."""
    assert typed == {line for line in EVERY_COMMAND if not needs_add_on(line)}
    prove(f"runbooks: {len(typed)} of {len(EVERY_COMMAND)} commands run as they are written")


async def make_stuck(kubevirt: KubeVirt) -> str:
    """Evict the VM, which fits no other node; returns the name of the VMIM."""
    refusal = await kubevirt.cluster.evict(await kubevirt.pod())
    assert refusal is not None
    assert "Eviction triggered evacuation" in str(refusal)

    async def has_begun() -> str | None:
        vmims = await kubevirt.cluster.vmims("db1", "shop")
        begun = [vmim for vmim in vmims if objects.phase(vmim) == "Scheduling"]
        return str(begun[-1]["metadata"]["name"]) if begun else None

    return await poll(has_begun, within=120, what="an attempt")
