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
from pathlib import Path

import structlog
from msgspec import to_builtins

from exporter import __version__
from exporter.counters import Counters
from exporter.engine.events import EventQueue
from exporter.engine.model import Instant, Resource, Seconds
from exporter.engine.store import Store
from exporter.engine.verdicts import VerdictView
from exporter.health import Health, HistoryHealth, Watched
from exporter.history.changes import PendingChanges
from exporter.history.configmap import ConfigMapWriter
from exporter.history.file import FileWriter
from exporter.history.reader import ConfigMapReader
from exporter.history.writer import HistoryWriter
from exporter.kube.client import ApiServer, Login, find_namespace
from exporter.kube.events import EventWriter
from exporter.kube.informers import Informers
from exporter.kube.lease import Lease
from exporter.kube.migration_log import MigrationLog
from exporter.kube.reflector import Reflector
from exporter.metrics.exposition import Exposition
from exporter.metrics.families import View
from exporter.server.access import Access
from exporter.server.admission import Admission
from exporter.server.api import Service
from exporter.server.apps import make_metrics_app, make_query_app
from exporter.server.blocked import LongPolls
from exporter.server.blocked_set import BlockedSet
from exporter.server.budget import Budget
from exporter.server.listeners import DRAIN, Listener
from exporter.settings import Authentication, ConfigMaps, Settings, Tls


LINGER: Seconds = 2.0
"""How long admission reviews are still answered at shutdown."""

log = structlog.stdlib.get_logger()


@dataclass(frozen=True)
class Listening:
    """The bound URLs; a port of 0 is replaced by the real one."""

    query: tuple[str, ...]
    metrics: tuple[str, ...]
    admission: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


async def run(
    settings: Settings,
    login: Login,
    stop: asyncio.Event,
    *,
    clock: Callable[[], Instant] = time.time,
    rng: random.Random | None = None,
    reflector: type[Reflector] = Reflector,
    on_listening: Callable[[Listening], None] | None = None,
) -> None:
    """Watch and serve until `stop` is set.

    Raises `NotSynced`, `KubeVirtMissing`, `NoCredentials`, `CannotListen` or
    `HistoryUnwritable`.
    """
    rng = rng or random.Random()
    store = Store(
        endings_kept=settings.policy.endings_kept,
        sees_all=not settings.namespaces,
        dead_after=settings.kube.dead_after,
    )
    health = Health(settings.kube.stale_after, settings.kube.dead_after)
    counters = Counters()
    view = VerdictView(store, settings.policy)
    blocked = BlockedSet(view, health, clock)
    polls = LongPolls(blocked)
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
        blocked=blocked,
        polls=polls,
        clock=clock,
        render_metrics=exposition.render,
    )
    for remark in settings.remarks:
        log.warning("setting_remark", remark=remark)
    async with ApiServer(login, read_timeout=settings.kube.read_timeout) as api:
        history = settings.history
        if isinstance(history, ConfigMaps) and not history.namespace:
            history = replace(history, namespace=find_namespace(login))
            settings = replace(settings, history=history)
        keeping = _prepare_keeping(
            settings, api, store, health, clock=clock, rng=rng, changed=polls.note_change
        )
        watch = Informers(
            api,
            store,
            health,
            settings.kube,
            namespaces=settings.namespaces,
            clock=clock,
            changed=keeping.note_change,
            rng=rng,
            reflector=reflector,
            listener=MigrationLog(
                store,
                counters,
                started_at=clock(),
                window=settings.policy.longest_window,
            ),
            policy=settings.policy,
        )
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
                policy=to_builtins(settings.policy),
            )
            if on_listening is not None:
                on_listening(listening)
            try:
                jobs = (watch.run(), *keeping.jobs(), *_report_events(settings, api, service))
                await _until_stopped(jobs, stop)
            finally:
                log.info("stopping")
                service.closing = True
                polls.close()
                # Meanwhile each answer closes its connection, so that the API server moves to
                # another replica before its idle connections are closed.
                linger = LINGER if settings.listen.admission else 0.0
                await asyncio.gather(keeping.close(), asyncio.sleep(linger))


@dataclass(frozen=True)
class _Keeping:
    """The stored history's writer and the watch of its ConfigMaps, if there are any."""

    changed: Callable[[], None]
    writer: HistoryWriter | None = None
    watch: Reflector | None = None

    def jobs(self) -> list[Coroutine[None, None, None]]:
        """The jobs to run beside the watch."""
        return [job.run() for job in (self.writer, self.watch) if job is not None]

    def note_change(self) -> None:
        """The store has changed."""
        self.changed()
        if self.writer is not None:
            self.writer.note_change()

    async def close(self) -> None:
        """Write the remaining changes, within the time-out."""
        if self.writer is None:
            return
        try:
            async with asyncio.timeout(DRAIN):
                await self.writer.close()
        except TimeoutError:
            log.warning("history_not_flushed", why=f"not written within {DRAIN:g} s")


def _prepare_keeping(
    settings: Settings,
    api: ApiServer,
    store: Store,
    health: Health,
    *,
    clock: Callable[[], Instant],
    rng: random.Random,
    changed: Callable[[], None],
) -> _Keeping:
    """Set up the stored history; a file is read at once. Raises `HistoryUnwritable`."""
    place, interval = settings.history, settings.kube.history_interval
    if place is None:
        return _Keeping(changed)
    changes = PendingChanges(store, settings.policy.longest_window)
    status = health.history = HistoryHealth(find_unwritten=lambda: changes.unwritten_since)
    if isinstance(place, Path):
        file = FileWriter(changes, health, status, place, interval=interval, clock=clock)
        file.read()
        return _Keeping(changed, file)
    watched = Watched(Resource.CONFIGMAPS, place.namespace)
    health.watched.append(watched)
    lease = Lease(
        api,
        place.namespace,
        place.name,
        identity=f"{socket.gethostname()}_{uuid.uuid4()}",
        duration=settings.kube.lease_duration,
        rng=rng,
        wall=clock,
    )
    reader = ConfigMapReader(changes, watched, status, place, clock=clock)
    writer = ConfigMapWriter(
        changes, health, status, api, reader, lease=lease, interval=interval, clock=clock
    )
    watch = Reflector(
        api, watched, reader, settings.kube, clock=clock, rng=rng, changed=reader.wake
    )
    keeping = _Keeping(changed, writer, watch)
    reader.merged = keeping.note_change
    return keeping


def _report_events(
    settings: Settings, api: ApiServer, service: Service
) -> list[Coroutine[None, None, None]]:
    """The job that writes Kubernetes Events, if it is on."""
    if not settings.events:
        return []
    service.counters.events = Counter()
    queue = EventQueue(service.counters.events)
    service.note_held = queue.note_held
    writer = EventWriter(
        api,
        service.store,
        service.health,
        settings.stuck,
        queue,
        instance=socket.gethostname(),
        clock=service.clock,
    )
    return [writer.run()]


async def _until_stopped(jobs: Iterable[Coroutine[None, None, None]], stop: asyncio.Event) -> None:
    """Run the jobs until `stop` is set or one of them ends; raise its error."""
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


def _expected_hosts(settings: Settings) -> frozenset[str] | None:
    """The names that a request to a query listener may have in `Host`.

    None: any name, because the network reaches the listener or callers need credentials.
    """
    listen = settings.listen
    asks = settings.auth.query is Authentication.KUBERNETES or settings.tls_query.client_ca_file
    if asks or not all(address.is_local for address in listen.query):
        return None
    return frozenset((*listen.hosts, *(address.host for address in listen.query)))


@asynccontextmanager
async def _listeners(
    settings: Settings, service: Service, api: ApiServer
) -> AsyncIterator[Listening]:
    auth = settings.auth
    access = Access(api, keep=auth.cache, outage=settings.kube.dead_after, clock=time.monotonic)
    shared = (auth, settings.limits, Budget(service.counters), service.health)
    own = replace(auth, socket_mode=0o600, socket_group=None)
    query = Listener(
        "query",
        make_query_app(
            service,
            access if auth.query is Authentication.KUBERNETES else None,
            hosts=_expected_hosts(settings),
        ),
        settings.listen.query,
        settings.tls_query,
        *shared,
    )
    metrics = Listener(
        "metrics",
        make_metrics_app(
            service,
            access if auth.metrics is Authentication.KUBERNETES else None,
            page=settings.listen.page,
        ),
        settings.listen.metrics,
        settings.tls_metrics,
        *shared,
    )
    async with AsyncExitStack() as stack:
        urls = {
            "query": await stack.enter_async_context(query.served()),
            "metrics": await stack.enter_async_context(metrics.served()),
        }
        if settings.listen.admission:
            admission = Listener(
                "admission",
                Admission(service, settings.admission).make_app(),
                settings.listen.admission,
                settings.tls_admission,
                *shared,
            )
            urls["admission"] = await stack.enter_async_context(admission.served())
        if settings.listen.local is not None:
            addresses = (settings.listen.local,)
            app = make_query_app(service)
            local = Listener("local", app, addresses, Tls(), own, *shared[1:])
            urls["local"] = await stack.enter_async_context(local.served())
        yield Listening(**urls)
