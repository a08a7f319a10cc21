"""Starts and stops the parts of the running program: watches, history and listeners."""

import asyncio
import random
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import structlog
from msgspec import to_builtins

from exporter import __version__
from exporter.clock import WallClock
from exporter.counters import COOLDOWN_BUCKETS, Counters, Histogram
from exporter.engine.evacuations.events import EventQueue
from exporter.engine.facts.changes import NoticeKind
from exporter.engine.facts.evidence import SavedVmi
from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.engine.store.evacuation_ends import EvacuationEnd
from exporter.engine.store.store import Store
from exporter.engine.verdicts.view import VerdictView
from exporter.health import Health, Watched, list_watches
from exporter.history import TASK, HistoryWriter, read_history
from exporter.kube.client import ApiServer
from exporter.kube.events import EventWriter
from exporter.kube.lease import Lease
from exporter.kube.login import Login, find_namespace
from exporter.kube.migration_log import MigrationLog
from exporter.kube.watch.informers import Informers
from exporter.kube.watch.reflector import Reflector
from exporter.metrics.begun_cooldowns import BegunCooldowns
from exporter.metrics.counts import forget_old_counts
from exporter.metrics.exposition import Exposition
from exporter.metrics.family import View
from exporter.responder.canceller import Canceller
from exporter.responder.writer import Responder
from exporter.server.admission.handlers import Admission
from exporter.server.api.handlers import Service
from exporter.server.apps import make_metrics_app, make_query_app
from exporter.server.http.access import Access
from exporter.server.http.budget import ConnectionBudget
from exporter.server.http.listeners import DRAIN, Listener
from exporter.settings import Authentication, EvictionRequestMode, Settings, Tls
from exporter.tasks import keep_running


Job: TypeAlias = Callable[[], Coroutine[None, None, None]]

LEASE = "kubevirt-eviction-exporter"
"""The name of the Lease whose holder writes Events about evacuations, and answers Evictions."""
FORGET_EVERY: Seconds = 60.0
"""The interval at which counts of nodes, namespaces and cooldowns that are gone are dropped."""
LINGER: Seconds = 2.0
"""How long admission reviews are still answered at shutdown."""

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
    names = settings.kubevirt
    async with ApiServer(login, read_timeout=kube.read_timeout, names=names) as api:
        await _until_stopped([api.log_in()], stop)
        if stop.is_set():
            return
        counters = Counters(
            events=Counter() if settings.events else None,
            begun_cooldowns=Histogram(policy.cooldown_steps or COOLDOWN_BUCKETS),
        )
        saved = dict[str, SavedVmi]()
        if settings.history is not None:
            saved = await asyncio.to_thread(
                read_history,
                settings.history,
                now=clock(),
                window=policy.longest_window,
                failures=counters.task_failures,
            )
        store = Store(
            endings_kept=policy.endings_kept,
            awaited=saved,
            names=names,
            deschedulers=settings.eviction_requests.deschedulers,
        )
        jobs: dict[str, Job] = {}
        closing: list[Job] = []
        history = None
        if settings.history is not None:
            writer = HistoryWriter(
                store,
                settings.history,
                counters.task_failures,
                interval=kube.history_interval,
                clock=clock,
            )
            store.subscribe(writer.record_change, *NoticeKind)
            jobs[TASK], history = writer.run, writer.status
            closing.append(writer.flush)
        health = Health(kube.stale_after, kube.dead_after, _choose_watches(settings), history)
        machine.on_step += [health.shift, store.shift]
        events = None if counters.events is None else EventQueue(counters.events)
        service = build_service(
            settings, store, health, counters=counters, events=events, clock=clock
        )
        store.drains.record_end = counters.count_drain
        store.evacuations.record_end = partial(_count_evacuation, counters)
        store.evictions.record_end = counters.count_eviction
        migrations = MigrationLog(store, counters, started_at=clock(), window=policy.longest_window)
        watch = Informers(
            api,
            store,
            health,
            kube,
            clock=clock,
            settled=service.polls.record_change,
            rng=rng,
            reflector=reflector,
            listener=migrations.record,
            policy=policy,
            failures=counters.task_failures,
        )
        if settings.writes:
            lease = Lease(
                api,
                find_namespace(login),
                LEASE,
                identity=f"{socket.gethostname()}_{uuid.uuid4()}",
                rng=rng,
                wall=clock,
            )
            jobs |= {"lease": lease.run, **_choose_writers(settings, service, api, lease, events)}
            closing.append(lease.release)
        jobs["counts"] = partial(_forget_old_counts, service)
        async with _listeners(settings, service, api) as listening:
            log.info(
                "started",
                version=__version__,
                query=listening.query,
                metrics=listening.metrics,
                admission=listening.admission,
                local=listening.local,
                namespaces=settings.namespaces or "all",
                history=str(settings.history or "none"),
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
                await asyncio.gather(_close(closing), asyncio.sleep(linger))


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
        record_blocked=None if events is None else events.record_blocked,
        links=settings.links,
    )
    begun = BegunCooldowns(store, settings.policy, health, counters.begun_cooldowns, clock)
    store.subscribe(begun.record_change, NoticeKind.EVIDENCE, NoticeKind.GONE)
    store.subscribe(view.record_change, *NoticeKind)
    store.subscribe(lambda _: service.polls.record_change(), *NoticeKind)
    return service


def _choose_writers(
    settings: Settings, service: Service, api: ApiServer, lease: Lease, events: EventQueue | None
) -> dict[str, Job]:
    """The jobs of what is written into the cluster by the holder of the Lease."""
    store, health, clock = service.store, service.health, service.clock
    requests, jobs = settings.eviction_requests, dict[str, Job]()
    if events is not None:
        name = socket.gethostname()
        reporter = EventWriter(
            api, store, health, settings.stuck, events, lease, instance=name, clock=clock
        )
        jobs["events"] = reporter.run
    if requests.responds:
        responder = Responder(
            api,
            store,
            health,
            settings.policy,
            settings.stuck,
            requests,
            lease,
            longest_hold=settings.admission.max_hold,
            clock=clock,
            count_hold=service.judge.count_blocked,
            record_hold=service.counters.held_evictions.observe,
        )
        jobs["responder"], health.responder = responder.run, responder.status
    if requests.cancel:
        canceller = Canceller(api, store, health, settings.stuck, lease, clock=clock)
        jobs["canceller"] = canceller.run
    return jobs


def _choose_watches(settings: Settings) -> list[Watched]:
    """The watches of every resource; Evictions are missed only if the settings ask for them."""
    watches, mode = list_watches(settings.namespaces), settings.eviction_requests.mode
    if mode is not EvictionRequestMode.OFF:
        evictions = (Resource.EVICTIONS,)
        unwanted = evictions if mode is None else ()
        watches += list_watches(settings.namespaces, evictions, unwanted=unwanted)
    return watches


async def _forget_old_counts(service: Service) -> None:
    while True:
        await asyncio.sleep(FORGET_EVERY)
        forget_old_counts(service.counters, service.store, service.clock())


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


async def _close(closing: Iterable[Job]) -> None:
    """Write the last changes and release the Lease, within the time-out."""
    try:
        async with asyncio.timeout(DRAIN):
            await asyncio.gather(*(close() for close in closing))
    except TimeoutError:
        log.warning("not_closed", why=f"not written or released within {DRAIN:g} s")


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
        requests = settings.eviction_requests
        responder = requests.name if requests.responds else ""
        admission = Admission(service, settings.admission, responder=responder).make_app()
        listeners.append(listener("admission", admission, listen.admission, settings.tls_admission))
    if listen.local is not None:
        local = make_query_app(service)
        own = replace(auth, socket_mode=0o600)
        listeners.append(listener("local", local, (listen.local,), Tls(), auth=own))
    async with AsyncExitStack() as stack:
        urls = {
            listener.name: await stack.enter_async_context(listener.served())
            for listener in listeners
        }
        yield Listening(**urls)
