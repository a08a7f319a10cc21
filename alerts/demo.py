"""`make alerts` runs Prometheus with our rules on the demo of `make run`, and prints the alerts.

The Prometheus that this project builds has no web pages, so `make alerts` prints each change.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import aiohttp

from exporter.demo import FOLDER


ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "alerts/prometheus.yaml"
ADDRESS = "127.0.0.1:9090"
PROMETHEUS = f"http://{ADDRESS}"
STARTS_WITHIN = 30.0
LOOKS_EVERY = 1.0

Alerts: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Each alert as Prometheus returns it, by its labels."""


class CannotShow(Exception):
    """The alerts cannot be shown. The text says why."""


def list_demos(folder: Path = FOLDER) -> list[str]:
    """The URLs of the metrics of all demos that have run, the newest first."""
    files = sorted(folder.glob("*/metrics"), key=lambda one: one.stat().st_mtime, reverse=True)
    return [file.read_text().replace("//0.0.0.0:", "//127.0.0.1:") for file in files]


async def find_exporter(urls: list[str]) -> str:
    """The first URL that answers. Raises `CannotShow`."""
    for url in urls:
        if await answers(f"{url}/readyz"):
            return url
    asked = ", ".join(urls) or "no demo has run here"
    raise CannotShow(f"no demo answers ({asked}): run `make run` in another terminal first")


def name_alert(alert: Mapping[str, Any]) -> str:
    """The name of the alert, followed by its VM, else its node, else its resource."""
    labels = alert["labels"]
    vm = "/".join(labels[key] for key in ("namespace", "name") if labels.get(key))
    about = vm or labels.get("node") or labels.get("resource") or ""
    return f"{labels['alertname']} {about}".rstrip()


def tell_changes(told: dict[str, Mapping[str, Any]], now: Alerts, exporter: str) -> Iterator[str]:
    """Yield a line when an alert first becomes pending, when it fires and when it ends.

    An alert that becomes pending several times has one line. The line of a firing alert is followed
    by its description, and the URL of its runbook on the exporter.
    """
    for key, alert in now.items():
        if key in told and told[key]["state"] == alert["state"]:
            continue
        told[key] = alert
        yield f"{alert['state']:<8} {name_alert(alert)}"
        if alert["state"] == "firing":
            notes = alert["annotations"]
            yield f"         {notes['description']}"
            yield f"         {exporter}/runbooks/{notes['runbook_url'].rpartition('/')[2]}"
    for key in [key for key, alert in told.items() if alert["state"] == "firing"]:
        if key not in now:
            yield f"over     {name_alert(told.pop(key))}"


async def read_alerts(session: aiohttp.ClientSession) -> Alerts:
    """The pending and firing alerts, sorted by name."""
    async with session.get("/api/v1/alerts") as response:
        alerts = (await response.json())["data"]["alerts"]
    alerts.sort(key=name_alert)
    return {repr(sorted(alert["labels"].items())): alert for alert in alerts}


async def show(session: aiohttp.ClientSession, exporter: str) -> NoReturn:
    """Print changes until the program ends."""
    told: dict[str, Mapping[str, Any]] = {}
    while True:
        for line in tell_changes(told, await read_alerts(session), exporter):
            at = " " * 8 if line.startswith(" ") else f"{datetime.now(UTC):%H:%M:%S}"
            print(f"{at}  {line}", flush=True)
        await asyncio.sleep(LOOKS_EVERY)


async def answers(url: str) -> bool:
    """Whether a server answers at this address with status 200."""
    with suppress(aiohttp.ClientError, TimeoutError):
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status == 200 and "Error opening" not in await response.text()
    return False


@asynccontextmanager
async def prometheus(exporter: str) -> AsyncIterator[None]:
    """Start a Prometheus that scrapes this URL, and wait until it is ready. Raises `CannotShow`."""
    if await answers(f"{PROMETHEUS}/-/ready"):
        raise CannotShow(f"{ADDRESS} is in use: another Prometheus answers there")
    places = [str(ROOT / ".tools/bin"), os.environ.get("KUBEBUILDER_ASSETS"), os.environ["PATH"]]
    program = shutil.which("prometheus", path=os.pathsep.join(filter(None, places)))
    if program is None:
        raise CannotShow("there is no prometheus: `make alerts` builds one")
    with tempfile.TemporaryDirectory() as data:
        target = exporter.rpartition("//")[2]
        config = CONFIG.read_text().replace("127.0.0.1:9811", target)
        config = config.replace("rules.yaml", str(CONFIG.with_name("rules.yaml")))
        (Path(data) / "prometheus.yaml").write_text(config)
        process = await asyncio.create_subprocess_exec(
            program,
            "--log.level=error",
            f"--config.file={data}/prometheus.yaml",
            f"--storage.tsdb.path={data}/data",
            f"--web.listen-address={ADDRESS}",
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(STARTS_WITHIN):
                while not await answers(f"{PROMETHEUS}/-/ready"):
                    if process.returncode is not None:
                        raise CannotShow("Prometheus ended at once; it says why above")
                    await asyncio.sleep(0.2)
            yield
        except TimeoutError:
            raise CannotShow(f"Prometheus was not ready within {STARTS_WITHIN:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def main() -> int:
    """Run until Ctrl-C. Returns 1 if the alerts cannot be shown."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None  # noqa: S101 (for mypy: a coroutine runs in a task)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, this.cancel)
    try:
        exporter = await find_exporter(list_demos())
        print(f"The alerts of the demo at {exporter}", flush=True)
        async with prometheus(exporter), aiohttp.ClientSession(PROMETHEUS) as session:
            if await answers(f"{PROMETHEUS}/alerts"):
                print(f"{PROMETHEUS}/alerts")
            print("Each change of an alert is printed. Ctrl-C ends this program.", flush=True)
            await show(session, exporter)
    except CannotShow as missing:
        print(missing, file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
