"""A recording of a cluster contains what the exporter has read."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

from exporter.engine.facts.changes import Observed, Removed
from exporter.engine.facts.model import EVIDENCE_RESOURCES, EndReason, Resource, Vmi
from exporter.engine.store.store import Store
from exporter.errors import Exit
from exporter.health import Health, Watched
from exporter.kube.login import Login
from exporter.kube.objects.kubevirt import parse_object
from exporter.kube.watch.informers import NotSynced
from exporter.settings import Settings, read_settings
from exporter.whatif.recorder import LineFile, Recorder, record
from exporter.whatif.recording import CannotRecord, Kind, Recorded
from tests.cluster import PATIENCE, PODS, VMIMS, VMIS, launcher_pod, vmi, vmim
from tests.support.api_servers import SimulatedStage, Stage
from tests.support.builders import (
    KEEP,
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_state_json,
    a_vmi,
    a_vmi_json,
    a_vmim_json,
    transitions_json,
)
from tests.support.relay import Gate
from tests.support.replaying import read_file
from tests.support.watching import QUICK


def read(path: Path) -> list[Recorded]:
    """The events of a recording, which must all be valid."""
    events, faults = read_file(path.read_bytes())
    assert not faults.count, faults.messages
    return events


def events_in(events: list[Recorded], namespace: str) -> list[tuple[Kind, Resource | None, str]]:
    """The events of one namespace's objects, by kind, resource and name."""
    lines = []
    for event in events:
        names = event.fact if event.fact is not None else event
        if getattr(names, "namespace", "") == namespace:
            lines.append((event.kind, event.resource, getattr(names, "name", "")))
    return lines


@dataclass
class Running:
    """A running recorder."""

    path: Path
    stop: asyncio.Event
    task: "asyncio.Task[None]"

    async def until(self, holds: Callable[[list[Recorded]], object]) -> list[Recorded]:
        """Wait until the file meets a condition."""
        deadline = time.monotonic() + PATIENCE
        while True:
            if self.task.done():
                await self.task
            events = read(self.path) if self.path.exists() else []
            if holds(events):
                return events
            assert time.monotonic() < deadline, events
            await asyncio.sleep(0.05)

    async def end(self) -> list[Recorded]:
        """Stop the recorder, and read the recording."""
        self.stop.set()
        await self.task
        return read(self.path)


@asynccontextmanager
async def recorded(
    login: Login, path: Path, namespace: str, *, lasts: float | None = None
) -> AsyncIterator[Running]:
    """Record one namespace during the block."""
    stop = asyncio.Event()
    settings = Settings(kube=QUICK, namespaces=(namespace,))
    task = asyncio.create_task(
        record(settings, login, stop, path=path, clock=time.time, lasts=lasts)
    )
    try:
        yield Running(path, stop, task)
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _flushes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush written lines at once."""
    monkeypatch.setattr("exporter.whatif.recorder.FLUSHED_EVERY", 0.05)


@pytest.mark.parametrize("name", ["cluster.ndjson", "cluster.ndjson.gz"])
async def test_what_a_cluster_says_is_in_the_file(stage: Stage, tmp_path: Path, name: str) -> None:
    """A recording has the first lists, all events in order, and an end."""
    namespace = await stage.make_namespace()
    made = await stage.admin.create(VMIS, vmi("a", namespace))
    await stage.admin.create(PODS, launcher_pod(made))
    async with recorded(stage.login, tmp_path / name, namespace) as running:
        await running.until(
            lambda events: (
                {e.resource for e in events if e.kind is Kind.SYNCED} >= {*EVIDENCE_RESOURCES}
            )
        )
        await stage.admin.create(VMIMS, vmim("m", namespace, of="a"))
        await running.until(
            lambda events: (Kind.ADDED, Resource.VMIMS, "m") in events_in(events, namespace)
        )
        await stage.admin.merge(VMIS, namespace, "a", {"status": {"nodeName": "n7"}})
        await running.until(
            lambda events: (Kind.MODIFIED, Resource.VMIS, "a") in events_in(events, namespace)
        )
        await stage.admin.delete(VMIS, namespace, "a")
        await running.until(
            lambda events: (Kind.DELETED, Resource.VMIS, "a") in events_in(events, namespace)
        )
        events = await running.end()

    assert [
        kind for kind, resource, _ in events_in(events, namespace) if resource is Resource.VMIS
    ] == [
        Kind.ADDED,
        Kind.MODIFIED,
        Kind.DELETED,
    ]
    assert events[-1].kind is Kind.ENDED
    assert [event.at for event in events] == sorted(event.at for event in events)
    known = [event.fact for event in events if isinstance(event.fact, Vmi)]
    assert [vmi.node for vmi in known] == ["n1", "n7"]


async def test_what_was_missed_is_in_the_file_after_a_new_list(
    stage: Stage, tmp_path: Path
) -> None:
    """After a gap the recording has the deletions, and no unchanged objects."""
    namespace = await stage.make_namespace()
    for name in ("stays", "goes"):
        await stage.admin.create(VMIS, vmi(name, namespace))
    path = tmp_path / "cluster.ndjson"
    async with (
        Gate(stage.url) as gate,
        recorded(stage.login_at(gate.url), path, namespace) as running,
    ):
        await running.until(lambda events: len(events_in(events, namespace)) == 2)
        await gate.shut()
        await stage.admin.delete(VMIS, namespace, "goes")
        await stage.admin.create(VMIS, vmi("comes", namespace))
        await stage.force_gone()
        gate.open()
        await running.until(lambda events: len(events_in(events, namespace)) == 4)
        events = await running.end()

    kinds = [(kind, name) for kind, _, name in events_in(events, namespace)]
    assert set(kinds[:2]) == {(Kind.ADDED, "stays"), (Kind.ADDED, "goes")}
    assert set(kinds[2:]) == {(Kind.ADDED, "comes"), (Kind.DELETED, "goes")}
    listed = [event for event in events if event.kind is Kind.SYNCED]
    assert sum(event.resource is Resource.VMIS for event in listed) == 2


async def test_ends_by_itself_when_its_time_is_over(stage: Stage, tmp_path: Path) -> None:
    """`--for` ends a recording as Ctrl-C does."""
    namespace = await stage.make_namespace()
    await stage.admin.create(VMIS, vmi("a", namespace))
    path = tmp_path / "cluster.ndjson"
    async with recorded(stage.login, path, namespace, lasts=2.0) as running:
        await asyncio.wait_for(running.task, PATIENCE)

    events = read(path)
    assert events[-1].kind is Kind.ENDED
    assert (Kind.ADDED, Resource.VMIS, "a") in events_in(events, namespace)


@pytest.mark.parametrize("answer", [401, 403, 500])
async def test_a_refused_recording_fails(
    simulated: SimulatedStage, tmp_path: Path, answer: int
) -> None:
    """If no VMI could be listed, a recording leaves no file, and its error says why."""
    simulated.server.answer(VMIS.plural, answer)
    path = tmp_path / "cluster.ndjson"
    with pytest.raises(NotSynced, match=f"before the end of the recording: {answer}"):
        await record(
            read_settings({}), simulated.login, asyncio.Event(),
            path=path, clock=time.time, lasts=1.0,
        )  # fmt: skip
    assert NotSynced.exit_code == Exit.NOT_SYNCED
    assert not path.exists()


async def test_what_may_not_be_seen_is_said_once(stage: Stage, tmp_path: Path) -> None:
    """A forbidden resource is reported once and the recording goes on."""
    namespace = await stage.make_namespace()
    await stage.admin.create(VMIS, vmi("a", namespace))
    login = await stage.limited_login([VMIS, VMIMS])
    path = tmp_path / "cluster.ndjson"
    async with recorded(login, path, namespace) as running:
        rejected = {Resource.PODS, Resource.KUBEVIRTS}
        await running.until(
            lambda events: rejected <= {e.resource for e in events if e.kind is Kind.REJECTED}
        )
        events = await running.end()

    assert sum(event.kind is Kind.REJECTED for event in events) == len(rejected)


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    """A missing directory is an error with its path."""
    with pytest.raises(CannotRecord, match="No such file or directory"):
        LineFile(tmp_path / "nowhere" / "cluster.ndjson")


def test_a_repetition_is_no_line(tmp_path: Path) -> None:
    """A repeated object or deletion adds no line to the recording."""
    file = LineFile(tmp_path / "cluster.ndjson")
    store = Store(endings_kept=KEEP)
    Recorder(store, file)
    for _ in range(3):
        store.apply(Observed(a_vmi()), NOW)
    store.apply(Removed(Resource.VMIS, NAMESPACE, NAME, UID), NOW)
    store.apply(Removed(Resource.VMIS, NAMESPACE, NAME, UID), NOW)
    file.close()

    assert file.lines == 3


def test_why_a_migration_failed_is_in_the_file(tmp_path: Path) -> None:
    """A recording has the reason of a failure as one word, without KubeVirt's text."""
    file = LineFile(tmp_path / "cluster.ndjson")
    store = Store(endings_kept=KEEP)
    recorder = Recorder(store, file)
    state = a_state_json(failed=True, failureReason="virError(Code=9, Message='of shop')")
    entered = transitions_json(Scheduled=NOW - 700.0, Failed=NOW - 600.0)
    made = a_vmim_json(phase="Failed", migrationState=state, phaseTransitionTimestamps=entered)
    changed = parse_object(Resource.VMIMS, msgspec.json.encode(made))
    recorder.record(changed)
    store.apply(Observed(changed.fact), NOW)
    file.close()

    (event,) = read(tmp_path / "cluster.ndjson")
    assert event.reason is EndReason.LIBVIRT
    assert b"of shop" not in (tmp_path / "cluster.ndjson").read_bytes()


def test_what_overrides_match_is_in_the_file(tmp_path: Path) -> None:
    """A recording has the labels that overrides match, and no others."""
    match = {"vmiLabels": {"tier": "gold"}, "priorityClasses": ["high"]}
    policy = read_settings({"policy": {"overrides": [{"name": "gold", "match": match}]}}).policy
    file = LineFile(tmp_path / "cluster.ndjson")
    store = Store(endings_kept=KEEP)
    recorder = Recorder(store, file, policy)
    for tier, other in (("gold", "1"), ("gold", "2"), ("none", "2"), ("none", "2")):
        made = a_vmi_json()
        made["spec"]["priorityClassName"] = "high"
        made["metadata"]["labels"] = {"tier": tier, "password": other}
        changed = parse_object(Resource.VMIS, msgspec.json.encode(made))
        recorder.record(changed)
        store.apply(Observed(changed.fact), NOW)
    file.close()

    traits = [event.traits for event in read(tmp_path / "cluster.ndjson")]
    assert [
        trait and policy.choose("any", trait.read_labels(), trait.priority_class)
        for trait in traits
    ] == ["gold", ""]
    assert b"password" not in (tmp_path / "cluster.ndjson").read_bytes()


def test_what_is_seen_in_one_namespace_is_not_rejected(tmp_path: Path) -> None:
    """A resource that is readable in one namespace is not recorded as forbidden."""
    path = tmp_path / "cluster.ndjson"
    file = LineFile(path)
    store = Store(endings_kept=KEEP)
    recorder = Recorder(store, file)
    here = Watched(Resource.VMIMS, "here", synced=True)
    health = Health(180.0, 600.0, [here, Watched(Resource.VMIMS, "there", rejected="403")])
    recorder.record_rejections(health, NOW)
    here.rejected = "403"
    recorder.record_rejections(health, NOW + 1)
    file.close()

    assert [(event.kind, event.at) for event in read(path)] == [(Kind.REJECTED, NOW + 1)]


def test_a_recording_is_given_up_where_no_more_can_be_written(tmp_path: Path) -> None:
    """Discarding a recording removes its file, also if the disk is full."""

    class Full(BytesIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "cluster.ndjson"
    file = LineFile(path)
    file._file.close()  # noqa: SLF001 (a disk cannot be filled here)
    file._file = Full()  # type: ignore[assignment]  # noqa: SLF001
    file.discard()

    assert not path.exists()
