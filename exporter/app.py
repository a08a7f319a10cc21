"""Starts and stops the parts of the running program: watches, history and listeners."""

import asyncio
import random
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import structlog
from msgspec import to_builtins

from exporter import __version__
from exporter.clock import WallClock
from exporter.counters import COOLDOWN_BUCKETS, Counters, Histogram
from exporter.engine.evacuations.events import EventQueue
from exporter.engine.facts.changes import NoticeKind
from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.engine.store.evacuation_ends import EvacuationEnd
from exporter.engine.store.store import Store
from exporter.engine.verdicts.view import VerdictView
from exporter.health import Health, HistoryFault, HistoryHealth, Watched, list_watches
from exporter.history.changes import PendingChanges
from exporter.history.configmap import ConfigMapWriter
from exporter.history.file import FileWriter, merge_files, read_files
from exporter.history.reader import ConfigMapReader
from exporter.history.writer import HistoryWriter, WriteSignal
from exporter.kube.client import ApiServer
from exporter.kube.events import EventWriter
from exporter.kube.lease import Lease
from exporter.kube.login import Login, find_namespace
from exporter.kube.migration_log import MigrationLog
from exporter.kube.watch.informers import Informers
from exporter.kube.watch.reflector import Reflector
from exporter.metrics.begun_cooldowns import BegunCooldowns
from exporter.metrics.exposition import Exposition
from exporter.metrics.family import View
from exporter.server.admission.handlers import Admission
from exporter.server.api.handlers import Service
from exporter.server.apps import make_metrics_app, make_query_app
from exporter.server.http.access import Access
from exporter.server.http.budget import ConnectionBudget
from exporter.server.http.listeners import DRAIN, Listener
from exporter.settings import Authentication, ConfigMaps, Settings, Tls
from exporter.tasks import keep_running


Job: TypeAlias = Callable[[], Coroutine[None, None, None]]

LINGER: Seconds = 2.0
"""How long admission reviews are still answered at shutdown."""

ANSWER_KINDS = (NoticeKind.EVIDENCE, NoticeKind.GONE, NoticeKind.EVERYTHING)
"""The kinds of changes that may change a verdict."""

log = structlog.stdlib.get_logger()


@dataclass(frozen=True)
class Listening:
    """The bound URLs; a port of 0 is replaced by the real port."""

    query: tuple[str, ...]
    metrics: tuple[str, ...]
    admission: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


async def run(
    settings: Settings,
    login: Login,
    stop: asyncio.Event,
    *,
    clock: Callable[[], Instant] | None = None,
    rng: random.Random | None = None,
    reflector: type[Reflector] = Reflector,
    on_listening: Callable[[Listening], None] = lambda _: None,
) -> None:
    """Watch and serve until `stop` is set. Without a `clock`, the time is that of this machine.

    Raises `NotSynced`, `KubeVirtMissing`, `NoCredentials`, `CannotListen` or
    `HistoryUnwritable`.
    """
    rng = rng or random.Random()
    machine = WallClock(time.time)
    clock = clock or machine
    policy, kube = settings.policy, settings.kube
    for remark in settings.remarks:
        log.warning("setting_remark", remark=remark)
    async with ApiServer(login, read_timeout=kube.read_timeout) as api:
        await _until_stopped([api.log_in()], stop)
        if stop.is_set():
            return
        contents: dict[Path, bytes | OSError] = {}
        if isinstance(settings.history, Path):
            await _until_stopped([read_files(settings.history, contents)], stop)
            if stop.is_set():
                return
        store = Store(endings_kept=policy.endings_kept)
        place = settings.history
        if isinstance(place, ConfigMaps) and not place.namespace:
            place = replace(place, namespace=find_namespace(login))
        watches = list_watches(settings.namespaces)
        if isinstance(place, ConfigMaps):
            watches.insert(0, Watched(Resource.CONFIGMAPS, place.namespace))
        history = None if place is None else HistoryHealth(loaded=isinstance(place, Path))
        health = Health(kube.stale_after, kube.dead_after, watches, history)
        machine.on_step += [health.shift, store.shift]
        counters = Counters(
            events=Counter() if settings.events else None,
            begun_cooldowns=Histogram(policy.cooldown_steps or COOLDOWN_BUCKETS),
        )
        events = None if counters.events is None else EventQueue(counters.events)
        service = build_service(
            settings, store, health, counters=counters, events=events, clock=clock
        )
        store.drains.note_end = counters.count_drain
        migrations = MigrationLog(store, counters, started_at=clock(), window=policy.longest_window)
        watch = Informers(
            api,
            store,
            health,
            kube,
            clock=clock,
            settled=service.polls.note_change,
            rng=rng,
            reflector=reflector,
            listener=migrations,
            policy=policy,
            failures=counters.task_failures,
        )
        saving, closing = _build_history(place, contents, settings, api, service, rng=rng)
        jobs = dict(saving)
        if events is not None:
            name = socket.gethostname()
            reporter = EventWriter(
                api, store, health, settings.stuck, events, instance=name, clock=clock
            )
            jobs["events"] = reporter.run
        async with _listeners(settings, service, api) as listening:
            log.info(
                "started",
                version=__version__,
                query=listening.query,
                metrics=listening.metrics,
                admission=listening.admission,
                local=listening.local,
                namespaces=settings.namespaces or "all",
                history=str(place or "none"),
                policy=to_builtins(policy.by_field),
            )
            on_listening(listening)
            try:
                kept = [
                    keep_running(name, job, counters.task_failures) for name, job in jobs.items()
                ]
                await _until_stopped([watch.run(), *kept], stop)
            finally:
                log.info("stopping")
                service.close()
                # Meanwhile each admission answer closes its connection, so that the API server
                # connects to another replica before its idle connections are closed.
                linger = LINGER if settings.listen.admission else 0.0
                await asyncio.gather(*(close() for close in closing), asyncio.sleep(linger))


def build_service(
    settings: Settings,
    store: Store,
    health: Health,
    *,
    counters: Counters,
    events: EventQueue | None,
    clock: Callable[[], Instant],
) -> Service:
    """The handlers for a store, whose changes are reported to the view and the long polls."""
    view = VerdictView(store, settings.policy)
    exposition = Exposition(
        lambda: View(
            store=store,
            verdicts=view,
            health=health,
            counters=counters,
            policy=settings.policy,
            stuck=settings.stuck,
            vmi_series=settings.limits.vmi_series,
            now=clock(),
        )
    )
    service = Service(
        store=store,
        view=view,
        health=health,
        counters=counters,
        policy=settings.policy,
        stuck=settings.stuck,
        limits=settings.limits,
        clock=clock,
        render_metrics=exposition.render,
        note_blocked=None if events is None else events.note_blocked,
        links=settings.links,
    )
    begun = BegunCooldowns(store, settings.policy, health, counters.begun_cooldowns, clock)
    store.subscribe(begun.note_change, NoticeKind.EVIDENCE, NoticeKind.GONE)
    store.subscribe(view.note_change, *ANSWER_KINDS)
    store.subscribe(lambda _: service.polls.note_change(), *ANSWER_KINDS)
    return service


def _build_history(
    place: Path | ConfigMaps | None,
    contents: Mapping[Path, bytes | OSError],
    settings: Settings,
    api: ApiServer,
    service: Service,
    *,
    rng: random.Random,
) -> tuple[dict[str, Job], list[Job]]:
    """The jobs that maintain the stored history, by name, and the jobs that close it.

    If it is a file, its `contents` are merged now.
    """
    store, health, clock = service.store, service.health, service.clock
    status, interval = health.history, settings.kube.history_interval
    count_end = partial(_count_evacuation, service.counters)
    if place is None or status is None:
        store.evacuations.note_end = count_end
        return {}, []
    changes = PendingChanges(store, settings.policy.longest_window, count_end)
    store.evacuations.note_end = changes.note_end
    signal = WriteSignal()
    store.subscribe(changes.note_change, NoticeKind.MEMORY)
    store.subscribe(lambda _: signal.awake.set(), NoticeKind.MEMORY)
    status.find_unwritten = lambda: changes.unwritten_since
    status.has_outdated = lambda: changes.has_outdated
    if isinstance(place, Path):
        status.may_write = lambda: True
        others = merge_files(changes, status, place, contents, clock())
        signal.awake.set()
        file = FileWriter(
            changes, health, status, signal, place, others=others, interval=interval, clock=clock
        )
        return {"history_writer": file.run}, [partial(_close_history, file)]
    lease = Lease(
        api,
        place.namespace,
        place.name,
        identity=f"{socket.gethostname()}_{uuid.uuid4()}",
        duration=settings.kube.lease_duration,
        rng=rng,
        wall=clock,
        changed=signal.hurry,
        note_malformed=partial(status.faults.update, (HistoryFault.LEASE_MALFORMED,)),
    )
    status.may_write = lambda: lease.held
    (watched,) = health.of(Resource.CONFIGMAPS)
    reader = ConfigMapReader(changes, watched, status, signal, place, clock=clock)
    writer = ConfigMapWriter(
        changes,
        health,
        status,
        signal,
        api,
        reader=reader,
        lease=lease,
        interval=interval,
        clock=clock,
    )
    watch = Reflector(api, watched, reader, settings.kube, clock=clock, rng=rng)
    jobs: dict[str, Job] = {
        "lease": lease.run,
        f"watch_{watched.resource}": watch.run,
        "history_reader": reader.run,
        "history_writer": writer.run,
    }
    return jobs, [partial(_close_history, writer, lease)]


def _count_evacuation(counters: Counters, end: EvacuationEnd) -> None:
    """Count and log an evacuation that has ended."""
    counters.count_evacuation(end)
    log.info(
        "evacuation_ended",
        **{
            "k8s.namespace.name": end.namespace,
            "kubevirt.vm.name": end.name,
            "kubevirt.vmi.uid": end.vmi_uid,
            "kubevirt.evacuation.node": end.node,
            "kubevirt.evacuation.source": str(end.source),
            "kubevirt.evacuation.outcome": str(end.outcome),
            "kubevirt.operation.duration_ms": int(end.duration * 1000),
        },
    )


async def _close_history(writer: HistoryWriter, lease: Lease | None = None) -> None:
    """Write the remaining changes and release the Lease, within the time-out."""
    try:
        async with asyncio.timeout(DRAIN):
            await writer.close()
            if lease is not None:
                await lease.release()
    except TimeoutError:
        log.warning("history_not_flushed", why=f"not written within {DRAIN:g} s")


async def _until_stopped(jobs: Iterable[Coroutine[None, None, None]], stop: asyncio.Event) -> None:
    """Run the jobs until `stop` is set or one of them ends; raise the error of that job."""
    running = [asyncio.create_task(job) for job in jobs]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((*running, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        for task in running:
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


@asynccontextmanager
async def _listeners(
    settings: Settings, service: Service, api: ApiServer
) -> AsyncIterator[Listening]:
    auth, listen = settings.auth, settings.listen
    access = Access(api, keep=auth.cache, outage=settings.kube.dead_after, clock=time.monotonic)
    checks = {Authentication.NONE: None, Authentication.KUBERNETES: access}
    listener = partial(
        Listener,
        auth=auth,
        limits=settings.limits,
        budget=ConnectionBudget(service.counters),
        health=service.health,
        failures=service.counters.task_failures,
    )
    # `Host` may have any name if the network can reach the listener or callers need credentials.
    hosts = None
    needs_credentials = auth.query is Authentication.KUBERNETES or settings.tls_query.client_ca_file
    if not needs_credentials and all(address.is_local for address in listen.query):
        hosts = frozenset((*listen.hosts, *(address.host for address in listen.query)))
    query = make_query_app(service, checks[auth.query], hosts=hosts)
    metrics = make_metrics_app(service, checks[auth.metrics], page=listen.page)
    listeners = [
        listener("query", query, listen.query, settings.tls_query),
        listener("metrics", metrics, listen.metrics, settings.tls_metrics),
    ]
    if listen.admission:
        admission = Admission(service, settings.admission).make_app()
        listeners.append(listener("admission", admission, listen.admission, settings.tls_admission))
    if listen.local is not None:
        local = make_query_app(service)
        own = replace(auth, socket_mode=0o600)
        listeners.append(listener("local", local, (listen.local,), Tls(), auth=own))
    async with AsyncExitStack() as stack:
        urls = {one.name: await stack.enter_async_context(one.served()) for one in listeners}
        yield Listening(**urls)
