"""A real Prometheus, a real Alertmanager, and a receiver of notifications."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from tests.cluster.servers import ReadyServer
from tests.generate.rules import RULES, Groups
from tests.support.serving import serving


EXAMPLE = RULES.parent / "alertmanager.yaml"
RECEIVERS = ("others", "virtualization", "virtualization-page", "virtualization-later")
"""Of the example, in its order."""
WITHIN = 600.0
"""How long to wait for an alert, in seconds: long enough for a busy machine."""
AT_ONCE = {"group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}


class Alertmanager(ReadyServer):
    """An Alertmanager with this configuration."""

    def __init__(self, directory: Path, config: object) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(
            "alertmanager",
            directory,
            config,
            f"--storage.path={directory / 'alertmanager'}",
            "--cluster.listen-address=",
        )

    async def post(self, alerts: list[dict[str, Any]]) -> None:
        """Post these alerts as firing."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/api/v2/alerts", json=alerts) as response,
        ):
            assert response.status == 200, await response.text()


def plain_config(receiver_url: str) -> dict[str, Any]:
    """A configuration that sends everything to one receiver at once."""
    hook = {"url": receiver_url, "send_resolved": True}
    return {
        "route": {"receiver": "test", **AT_ONCE, "repeat_interval": "1h"},
        "receivers": [{"name": "test", "webhook_configs": [hook]}],
    }


def example_config(receiver_urls: Mapping[str, str]) -> dict[str, Any]:
    """The shipped example with these URLs for its receivers, and with short waits.

    It still waits for a second, because an alert may arrive just before the one that inhibits it.
    """
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config["route"] |= {**AT_ONCE, "group_wait": "1s"}
    for receiver in config["receivers"]:
        url = receiver_urls[receiver["name"]]
        receiver["webhook_configs"] = [{"url": url, "send_resolved": True}]
    return config


class Prometheus(ReadyServer):
    """A Prometheus that evaluates the rules every second, and scrapes each target every two
    seconds.

    On a busy machine, faster scrapes would fail. After a failed scrape every alert starts again.
    """

    def __init__(
        self,
        directory: Path,
        rules: Groups,
        *,
        targets: list[dict[str, Any]],
        alertmanagers: Sequence[str] = (),
    ) -> None:
        file = directory / "rules.yaml"
        file.write_text(yaml.safe_dump(rules, sort_keys=False))
        config = {
            "global": {
                "scrape_interval": "2s",
                "scrape_timeout": "2s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(file)],
            "scrape_configs": [{"job_name": "exporter", "static_configs": targets}],
            "alerting": {
                "alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]
                if alertmanagers
                else []
            },
        }
        super().__init__(
            "prometheus",
            directory,
            config,
            f"--storage.tsdb.path={directory / 'prometheus'}",
        )

    async def ask(self, endpoint: str, **fields: str) -> Any:
        """Ask the HTTP API; returns the data of its answer."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/api/v1/{endpoint}", params=fields) as response,
        ):
            answer = await response.json()
        assert answer["status"] == "success", (fields, answer)
        return answer["data"]


class Receiver:
    """A webhook; `received` has all notifications, oldest first."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._running = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/", self._record)
        self.url = await self._running.enter_async_context(serving(app)) + "/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    def firing(self) -> list[dict[str, Any]]:
        """The alerts whose last notification says that they fire."""
        last = {json.dumps(alert["labels"], sort_keys=True): alert for alert in self.received}
        return [alert for alert in last.values() if alert["status"] == "firing"]

    async def fires(self, alert: str, cause: str | None = None, **labels: str) -> None:
        """Wait until an alert with these labels is firing."""
        await self._until(
            lambda: bool(_such(self.firing(), alert, cause, labels)), f"{alert} {cause} firing"
        )

    async def resolves(self, alert: str, cause: str | None = None, **labels: str) -> None:
        """Wait until no alert with these labels is firing any more."""
        await self._until(
            lambda: not _such(self.firing(), alert, cause, labels), f"{alert} {cause} resolved"
        )

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN), self._changed:
                await self._changed.wait_for(holds)
        except TimeoutError:
            names = sorted({alert["labels"]["alertname"] for alert in self.firing()})
            raise TimeoutError(f"{what}: not within {WITHIN:g} s; firing: {names}") from None

    async def _record(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self._changed:
            self.received += body["alerts"]
            self._changed.notify_all()
        return web.Response()


def _such(
    alerts: list[dict[str, Any]], name: str, cause: str | None, labels: dict[str, str]
) -> list[dict[str, Any]]:
    wanted = {"alertname": name, **({"cause": cause} if cause else {}), **labels}.items()
    return [alert for alert in alerts if wanted <= alert["labels"].items()]
