"""After random faults a watch has the same verdicts as a watch without faults."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from exporter.engine.facts.changes import Change, Listed
from exporter.engine.facts.model import CLUSTER_RESOURCES
from exporter.engine.facts.trust import Trust
from exporter.health import Restart
from exporter.kube.watch.feed import FactSink
from exporter.kube.watch.reflector import Reflector
from tests.program.test_watch import Brisk
from tests.support.api_servers import SimulatedStage, Stage
from tests.support.lives import Script, compare
from tests.support.relay import Gate
from tests.support.watching import Following, following


Prove: TypeAlias = Callable[[str], None]

SHUT_STEPS = 12


class Unlisting:
    """A sink that ignores lists, so an object that a list lacks is not removed."""

    def __init__(self, sink: FactSink) -> None:
        self._sink = sink

    def apply(self, change: Change, at: float) -> int:
        """Apply a change, unless it is a list."""
        return 0 if isinstance(change, Listed) else self._sink.apply(change, at)


class Merging(Brisk):
    """A broken reflector: an object that a new list lacks is kept."""

    def __init__(self, api: Any, watched: Any, sink: FactSink, *args: Any, **kwargs: Any) -> None:
        super().__init__(api, watched, Unlisting(sink), *args, **kwargs)


class Stubborn(Brisk):
    """A broken reflector that keeps its version after a 410."""

    def _forget_version(self) -> None:
        return


@pytest.mark.parametrize(("broken", "count", "noticed"), [(Merging, 20, 1), (Stubborn, 3, 3)])
async def test_the_comparison_notices_a_broken_watch(
    simulated: SimulatedStage,
    prove: Prove,
    broken: type[Reflector],
    count: int,
    noticed: int,
) -> None:
    """The comparison finds a reflector that merges lists or ignores a 410."""
    wrong = tried = 0
    while wrong < noticed and tried < count:
        try:
            differences = await play(simulated, tried, reflector=broken, fault=gone, wait=2.0)
        except TimeoutError:
            differences = ["never caught up"]
        wrong += bool(differences)
        tried += 1
    prove(f"sequences: with a {broken.__name__} watch {wrong} of {tried} with a 410 differ")

    assert wrong >= noticed


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.soak)])
async def test_verdicts_after_faults_equal_an_undisturbed_runs(
    simulated: SimulatedStage, prove: Prove, count: int
) -> None:
    """On the simulated server verdicts are right after cuts, 410s and restarts."""
    met = await play_all(simulated, range(count))
    prove(f"sequences: {count} on the simulated server, no verdict differs; faults {met}")


async def play_all(stage: Stage, seeds: range) -> dict[str, int]:
    """Run each seed with one of the faults; no verdict may differ. Returns the fault counts."""
    met: dict[str, int] = {}
    for seed in seeds:
        fault = (cut, gone, restart)[seed % 3]
        met[fault.__name__] = met.get(fault.__name__, 0) + 1
        differences = await play(stage, seed, reflector=Brisk, fault=fault)
        assert not differences, "\n".join([f"seed {seed}, {fault.__name__}", *differences])
    return met


async def play(
    stage: Stage,
    seed: int,
    *,
    reflector: type[Reflector],
    fault: Callable[[Stage, Gate, Script], Awaitable[Restart | None]],
    wait: float = 30.0,
) -> list[str]:
    """Run one sequence with one fault in the middle; returns the differing verdicts."""
    namespace = await stage.make_namespace()
    script = Script(stage, namespace, seed)
    async with (
        Gate(stage.url) as gate,
        following(stage.login_at(gate.url), namespaces=(namespace,), reflector=reflector) as watch,
    ):
        await script.play(15)
        await watch.ready()
        expected = await fault(stage, gate, script)
        await script.play(10)
        await caught_up(watch, script, wait)
        if expected is not None:
            assert sum(watch.restarts(r).get(expected, 0) for r in CLUSTER_RESOURCES) >= 1
        return compare(script.expected, watch.store, namespace, script.now)


async def caught_up(watch: Following, script: Script, wait: float) -> None:
    """Wait until the watch has seen the last object of every kind."""
    label, _, pod = await script.mark("last")
    store, namespace = watch.store, script.namespace

    def seen() -> bool:
        evidence = store.evidence(namespace, label, Trust())
        return (
            evidence is not None
            and bool(evidence.vmims)
            and evidence.launcher is not None
            and evidence.launcher.name == pod
        )

    await watch.until(seen, what="the last objects", wait=wait)


async def cut(_stage: Stage, gate: Gate, script: Script) -> Restart:
    """Break the connection for some steps."""
    await gate.shut()
    await script.play(SHUT_STEPS)
    gate.open()
    return Restart.UNREACHABLE


async def gone(stage: Stage, gate: Gate, script: Script) -> Restart:
    """Break the connection for some steps, and compact the server, which causes a 410."""
    await gate.shut()
    await script.play(SHUT_STEPS)
    await stage.force_gone()
    gate.open()
    return Restart.EXPIRED


async def restart(stage: Stage, _gate: Gate, script: Script) -> None:
    """Restart the server; the script goes on at once."""
    await stage.restart()
    await script.play(SHUT_STEPS)
