"""The running program: watch, listeners and shutdown, put together in one place."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from aiohttp import web
from msgspec.structs import asdict

from exporter import __version__
from exporter.api import Service, make_metrics_app, make_query_app
from exporter.blocked import BlockedSet
from exporter.counters import Counters
from exporter.health import Health
from exporter.kube import ApiServer, Login
from exporter.metrics import Exposition, View
from exporter.model import Instant, Seconds
from exporter.settings import Address, Settings
from exporter.store import Store
from exporter.watch import Follower, Watch


DRAIN: Seconds = 5.0
"""How long requests under way may take to end at shutdown."""

log = structlog.stdlib.get_logger()


class CannotListen(Exception):
    """An address cannot be listened on; the text says which and why."""


@dataclass(frozen=True)
class Listening:
    """The URLs that are served, as bound: a port of 0 has become a real one."""

    query: tuple[str, ...]
    metrics: tuple[str, ...]


async def run(
    settings: Settings,
    login: Login,
    stop: asyncio.Event,
    *,
    clock: Callable[[], Instant] = time.time,
    rng: random.Random | None = None,
    follower: type[Follower] = Follower,
    on_listening: Callable[[Listening], None] | None = None,
) -> None:
    """Watch and serve until `stop` is set.

    Raises `NotSynced`, `KubeVirtMissing`, `NoCredentials` or `CannotListen`.
    """
    store = Store(
        endings_kept=settings.policy.endings_kept,
        sees_all=not settings.namespaces,
        started_at=clock(),
    )
    health = Health(settings.kube.stale_after, settings.kube.dead_after)
    counters = Counters()
    blocked = BlockedSet(store, health, settings.policy, clock)
    exposition = Exposition(
        lambda: View(
            store=store,
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
        health=health,
        counters=counters,
        policy=settings.policy,
        stuck=settings.stuck,
        limits=settings.limits,
        blocked=blocked,
        clock=clock,
        render_metrics=exposition.render,
    )
    for remark in settings.remarks:
        log.warning("setting_remark", remark=remark)
    async with ApiServer(login, read_timeout=settings.kube.read_timeout) as api:
        watch = Watch(
            api,
            store,
            health,
            settings.kube,
            namespaces=settings.namespaces,
            clock=clock,
            changed=blocked.note_change,
            rng=rng or random.Random(),
            follower=follower,
        )
        async with _listeners(settings, service) as listening:
            log.info(
                "started",
                version=__version__,
                query=listening.query,
                metrics=listening.metrics,
                namespaces=settings.namespaces or "all",
                policy=asdict(settings.policy),
            )
            if on_listening is not None:
                on_listening(listening)
            try:
                await _until_stopped(watch, stop)
            finally:
                log.info("stopping")
                service.closing = True
                blocked.close()


async def _until_stopped(watch: Watch, stop: asyncio.Event) -> None:
    """Run the watch until `stop` is set; what ends the watch ends the program."""
    watching = asyncio.create_task(watch.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((watching, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        watching.cancel()
        results = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


@asynccontextmanager
async def _listeners(settings: Settings, service: Service) -> AsyncIterator[Listening]:
    query, metrics = (
        web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN, handler_cancellation=True)
        for app in (make_query_app(service), make_metrics_app(service))
    )
    try:
        yield Listening(
            query=await _listen(query, settings.listen.query),
            metrics=await _listen(metrics, settings.listen.metrics),
        )
    finally:
        await asyncio.gather(query.cleanup(), metrics.cleanup())


async def _listen(runner: web.AppRunner, addresses: tuple[Address, ...]) -> tuple[str, ...]:
    await runner.setup()
    urls = []
    for address in addresses:
        site: web.BaseSite
        if address.path:
            if await _is_served(address.path):
                raise CannotListen(f"{address}: another process listens there")
            site = web.UnixSite(runner, address.path)
        else:
            site = web.TCPSite(runner, address.host, address.port)
        try:
            await site.start()
        except OSError as error:
            raise CannotListen(f"{address}: {error.strerror or error}") from error
        urls.append(_url(address, runner))
    return tuple(urls)


async def _is_served(path: str) -> bool:
    """Whether somebody answers on a unix socket: binding would take it from them unasked."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


def _url(address: Address, runner: web.AppRunner) -> str:
    if address.path:
        return f"unix:{Path(address.path)}"
    port = address.port or runner.addresses[-1][1]
    return f"http://{Address(address.host, port)}"
