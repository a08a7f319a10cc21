"""Every command of every runbook, typed as written, beside KubeVirt's own controllers.

The VMs are stand-ins: their launcher pods run, and nothing is in them.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.demo import objects
from tests.alerts.test_runbooks import EVERY_COMMAND, TEXTS, commands
from tests.cluster import poll
from tests.e2e.cluster import Cluster
from tests.e2e.documents import CERTIFICATE, type_section
from tests.e2e.kubevirt import KubeVirt
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAMESPACE
from tests.generate.rules import fenced


STUCK = "KubeVirtEvacuationStuck"
OVER_TLS = re.compile("https://localhost:1?9810")
"""In the blocks for installations whose query listener has TLS."""
EXAMPLE = "kubevirt-evacuation-x1x1x"
"""Where a reader puts the name of the attempt."""
OURS = {"NAMESPACE=bank NAME=churn-1": "NAMESPACE=shop NAME=db1", "NODE=node-1": "NODE=n1"}
"""What a reader exports: the VM and its node, in place of the demo's."""


@pytest.fixture(scope="module")
def terminal(cluster: Cluster, scratch: Path) -> Iterator[Terminal]:
    """Somebody with the certificate."""
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, CERTIFICATE)
        yield terminal
    cluster.kubectl("delete", "namespace", NAMESPACE)


@pytest.fixture(scope="module")
def typed() -> set[str]:
    """The commands of the runbooks that were typed."""
    return set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlay", ["sidecar", "standalone"])
async def test_every_command_runs(
    cluster: Cluster, kubevirt: KubeVirt, terminal: Terminal, typed: set[str], overlay: str
) -> None:
    """With the sidecar; and with two replicas those that are for a query listener with TLS."""
    over_tls = overlay == "standalone"
    way = "Standalone" if over_tls else "A descheduler with its sidecar"
    if not over_tls:
        cluster.run_pause("kube-system", "descheduler")
    await asyncio.to_thread(type_section, terminal, f"{way}, by kustomize")
    terminal.type_unlisted("kubectl apply --server-side -k deploy/overlays/monitoring")
    for name, text in TEXTS.items():
        attempt = EXAMPLE
        if name == STUCK and not over_tls:
            attempt = await make_stuck(kubevirt)
        with cluster.terminal(Path(terminal.type_unlisted("echo $TMPDIR").strip())) as shell:
            for command in blocks(text, over_tls=over_tls):
                line = command.replace(EXAMPLE, attempt)
                for example, own in OURS.items():
                    line = line.replace(example, own)
                await asyncio.to_thread(shell.type, line)
                typed.add(command)
                if "rollout restart" in line:
                    await asyncio.to_thread(cluster.rolled_out)
        if name == STUCK and not over_tls:
            assert not await kubevirt.is_marked()
        await kubevirt.calm()


def test_none_was_left_out(typed: set[str], prove: Callable[[str], None]) -> None:
    """All of them were typed."""
    assert typed == set(EVERY_COMMAND)
    prove(f"runbooks: {len(typed)} of {len(EVERY_COMMAND)} commands run as they are written")


def blocks(text: str, *, over_tls: bool) -> Iterator[str]:
    """A runbook's commands, without the blocks for the other kind of installation."""
    for block in fenced(text, "bash"):
        lines = commands(f"```bash\n{block}```\n")
        if bool(OVER_TLS.search(block)) == over_tls:
            yield from lines
        elif over_tls:
            yield from (line for line in lines if line.startswith("export "))


async def make_stuck(kubevirt: KubeVirt) -> str:
    """Evict the VM, which no other node can take; the name of the attempt."""
    refusal = await kubevirt.cluster.evict(await kubevirt.pod())
    assert refusal is not None
    assert "Eviction triggered evacuation" in str(refusal)

    async def has_begun() -> str | None:
        found = await kubevirt.cluster.vmims("db1", "shop")
        begun = [one for one in found if objects.phase(one) == "Scheduling"]
        return str(begun[-1]["metadata"]["name"]) if begun else None

    return await poll(has_begun, within=120, what="an attempt")
