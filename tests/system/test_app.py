"""The whole program as a process of its own, against the simulated API server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from exporter.cli.commands import Exit
from tests.cluster import PATIENCE, VMIS, find_binary, vmi
from tests.support.api_servers import SimulatedStage
from tests.support.builders import rfc3339


TOKEN = "a-secret-token-that-nobody-may-read"
PORTS = {"query": "127.0.0.1:0", "metrics": "127.0.0.1:0"}


@dataclass
class Program:
    """A running exporter, and everything that it has written."""

    process: asyncio.subprocess.Process
    out: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def read(self) -> None:
        """Take in what it writes, to its end."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        await asyncio.gather(
            self._read(self.process.stdout, self.out), self._read(self.process.stderr, self.logs)
        )

    async def _read(self, stream: asyncio.StreamReader, lines: list[str]) -> None:
        async for line in stream:
            async with self.news:
                lines.append(line.decode().rstrip("\n"))
                self.news.notify_all()

    def events(self, event: str) -> list[dict[str, Any]]:
        """The JSON lines of this event so far."""
        return [line for line in map(json.loads, self.logs) if line["event"] == event]

    async def logged(self, event: str) -> dict[str, Any]:
        """The first line of this event, once it is written."""
        async with asyncio.timeout(PATIENCE), self.news:
            await self.news.wait_for(lambda: self.events(event))
        return self.events(event)[0]

    async def ended(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def terminated(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    @property
    def written(self) -> str:
        """Everything that it has written."""
        return "\n".join(self.out + self.logs)


@asynccontextmanager
async def running(*arguments: str, **environment: str) -> AsyncIterator[Program]:
    """`python -m exporter` with these arguments, killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "exporter",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    program = Program(process)
    reading = asyncio.create_task(program.read())
    try:
        yield program
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def finished(*arguments: str, **environment: str) -> tuple[int, Program]:
    """The exit code of a program that ends by itself, and what it wrote."""
    async with running(*arguments, **environment) as program:
        code = await program.ended()
    return code, program


def configured(directory: Path, **sections: Any) -> str:
    """The path of a configuration that listens on free ports."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump({"listen": PORTS} | sections), encoding="utf-8")
    return str(path)


def logging_in(directory: Path, url: str, token: str = TOKEN) -> str:
    """The path of a kubeconfig with a token for the server at a URL."""
    path = directory / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the program is ready."""
    async with asyncio.timeout(PATIENCE):
        while True:
            async with session.get(f"{url}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


class TestExits:
    """What it exits with, and what it says then."""

    async def test_without_credentials(self, tmp_path: Path) -> None:
        """No service account and no kubeconfig: 5, before anything is listened on."""
        code, program = await finished(
            "--config", configured(tmp_path), KUBECONFIG=str(tmp_path / "none"), HOME=str(tmp_path)
        )

        assert code == Exit.NO_CREDENTIALS
        assert "service account" in program.events("stopped")[0]["why"]
        assert not program.events("started")

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param(f"users: [{{name: u, user: {{token: '{TOKEN}}}", id="broken-yaml"),
            pytest.param(f"token: {TOKEN}\nusers: [{{user: {TOKEN}}}]", id="no-kubeconfig"),
            pytest.param(f"- {TOKEN}", id="a-list"),
            pytest.param(f"\x00{TOKEN}", id="binary"),
            pytest.param("", id="empty"),
        ],
    )
    async def test_with_a_kubeconfig_that_cannot_be_used(self, tmp_path: Path, text: str) -> None:
        """A file that is no kubeconfig: 5, in words, and nothing of what stands in it."""
        path = tmp_path / "kubeconfig"
        path.write_text(text, encoding="utf-8")
        code, program = await finished("--config", configured(tmp_path), "--kubeconfig", str(path))

        assert code == Exit.NO_CREDENTIALS
        assert str(path) in program.events("stopped")[0]["why"]
        assert TOKEN not in program.written

    @pytest.mark.parametrize("listener", ["query", "metrics"])
    async def test_where_it_cannot_listen(
        self, simulated: SimulatedStage, tmp_path: Path, listener: str
    ) -> None:
        """A port that is in use: 6, with the address."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            config = configured(tmp_path, listen=PORTS | {listener: address})
            code, program = await finished(
                "--config", config, "--kubeconfig", logging_in(tmp_path, simulated.url)
            )

        assert code == Exit.CANNOT_LISTEN
        assert address in program.events("stopped")[0]["why"]

    async def test_where_another_process_serves_the_socket(
        self, simulated: SimulatedStage, tmp_path: Path
    ) -> None:
        """A unix socket on which somebody answers is not taken away: 6."""
        path = tmp_path / "q.sock"
        with socket.socket(socket.AF_UNIX) as taken:
            taken.bind(str(path))
            taken.listen()
            config = configured(tmp_path, listen=PORTS | {"query": f"unix:{path}"})
            code, program = await finished(
                "--config", config, "--kubeconfig", logging_in(tmp_path, simulated.url)
            )

        assert code == Exit.CANNOT_LISTEN
        assert "another process" in program.events("stopped")[0]["why"]
        assert path.exists()

    async def test_where_the_demo_cannot_listen(self, tmp_path: Path) -> None:
        """The demo is the same program: a socket in no directory is 6 there too."""
        config = configured(tmp_path, listen=PORTS | {"query": f"unix:{tmp_path}/none/q.sock"})
        code, program = await finished("demo", "--config", config)

        assert code == Exit.CANNOT_LISTEN
        assert "none/q.sock" in program.events("stopped")[0]["why"]

    @pytest.mark.parametrize("answer", [401, 403], ids=["unauthorized", "forbidden"])
    async def test_where_it_may_not_list(
        self, simulated: SimulatedStage, tmp_path: Path, answer: int
    ) -> None:
        """VMIs that may not be listed in time: 3, with the server's reason and never the token."""
        if answer == 401:
            simulated.server.tokens = frozenset({"another"})
        else:
            simulated.server.answer(VMIS.plural, 403)
        code, program = await finished(
            "--config",
            configured(tmp_path, kube={"syncTimeout": "1s"}),
            "--kubeconfig",
            logging_in(tmp_path, simulated.url),
            "--log-level",
            "debug",
        )

        assert code == Exit.NOT_SYNCED
        assert str(answer) in program.events("stopped")[0]["why"]
        assert program.events("watch_broke")
        assert TOKEN not in program.written

    async def test_where_nothing_answers(self, tmp_path: Path) -> None:
        """An API server that is not there: 3, with the last error."""
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code, program = await finished(
            "--config",
            configured(tmp_path, kube={"syncTimeout": "500ms"}),
            "--kubeconfig",
            logging_in(tmp_path, url),
        )

        assert code == Exit.NOT_SYNCED
        assert "virtualmachineinstances" in program.events("stopped")[0]["why"]

    async def test_where_kubevirt_is_missing(
        self, simulated: SimulatedStage, tmp_path: Path
    ) -> None:
        """An API server that knows no VMIs: 4, with what to set to wait for them."""
        simulated.server.answer(VMIS.plural, 404)
        code, program = await finished(
            "--config", configured(tmp_path), "--kubeconfig", logging_in(tmp_path, simulated.url)
        )

        assert code == Exit.KUBEVIRT_MISSING
        assert "kube.waitForKubeVirt" in program.events("stopped")[0]["why"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
    async def test_by_a_signal_before_the_sync(
        self, simulated: SimulatedStage, tmp_path: Path, number: signal.Signals
    ) -> None:
        """SIGTERM and Ctrl-C end it well, also while it waits for KubeVirt."""
        simulated.server.answer(VMIS.plural, 404)
        async with running(
            "--config",
            configured(tmp_path, kube={"waitForKubeVirt": True}),
            "--kubeconfig",
            logging_in(tmp_path, simulated.url),
        ) as program:
            await program.logged("waiting_for_kubevirt")
            program.process.send_signal(number)
            code = await program.ended()

        assert code == Exit.OK
        assert "Traceback" not in program.written


class TestRunning:
    """The main job, from its start to SIGTERM."""

    async def test_serves_and_ends(self, simulated: SimulatedStage, tmp_path: Path) -> None:
        """Both listeners answer from what the server shows; SIGTERM answers who waits; exit 0."""
        simulated.server.tokens = frozenset({TOKEN})
        config = configured(
            tmp_path, listen=PORTS | {"query": [PORTS["query"], f"unix:{tmp_path}/q.sock"]}
        )
        async with (
            running(
                "--config", config, "--kubeconfig", logging_in(tmp_path, simulated.url)
            ) as program,
            aiohttp.ClientSession() as session,
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(tmp_path / "q.sock"))
            ) as on_socket,
        ):
            started = await program.logged("started")
            (query, unix), (metrics,) = started["query"], started["metrics"]
            await ready(session, metrics)
            async with session.get(f"{query}/v1/blocked") as response:
                etag = response.headers["ETag"]
            held = asyncio.create_task(
                session.get(f"{query}/v1/blocked?wait=60", headers={"If-None-Match": etag})
            )
            body = {"candidates": [{"namespace": "shop", "name": "nobody"}]}
            async with on_socket.post("http://unix/v1/verdicts", json=body) as response:
                verdicts = (await response.json())["verdicts"]
            async with session.get(f"{metrics}/v1/blocked") as response:
                hidden = response.status
            async with session.get(f"{metrics}/metrics") as response:
                exposition = await response.text()
            code = await program.terminated()
            async with await held as response:
                last = response.status

        assert unix == f"unix:{tmp_path}/q.sock"
        assert [one["known"] for one in verdicts] == [False]
        assert hidden == 404
        assert 'synced{resource="virtualmachineinstances"} 1.0' in exposition
        assert last == 304
        assert code == Exit.OK
        assert [line["event"] for line in map(json.loads, program.logs)][-1] == "stopping"
        assert TOKEN not in program.written

    async def test_forgets_who_has_gone(self, simulated: SimulatedStage, tmp_path: Path) -> None:
        """A caller that hangs up during a long poll is not waited for."""
        async with (
            running(
                "--config",
                configured(tmp_path),
                "--kubeconfig",
                logging_in(tmp_path, simulated.url),
            ) as program,
            aiohttp.ClientSession() as session,
        ):
            query = (await program.logged("started"))["query"][0]
            await ready(session, query)
            async with session.get(f"{query}/v1/blocked") as response:
                etag = response.headers["ETag"]
            counted = 'request_duration_seconds_count{endpoint="blocked_wait"} '
            async with asyncio.timeout(PATIENCE):
                exposition = ""
                # A busy program may not have taken the request yet when the caller hangs up.
                while f"{counted}1" not in exposition:
                    with pytest.raises(TimeoutError):
                        await session.get(
                            f"{query}/v1/blocked?wait=60",
                            headers={"If-None-Match": etag},
                            timeout=aiohttp.ClientTimeout(total=0.5),
                        )
                    async with session.get(f"{query}/metrics") as response:
                        exposition = await response.text()
            code = await program.terminated()

        assert code == Exit.OK

    async def test_follows_a_vmi_from_migration_to_release(
        self, simulated: SimulatedStage, tmp_path: Path
    ) -> None:
        """A migration blocks at `filter`, its cooldown at `preEviction`, until it runs out."""
        config = configured(tmp_path, policy={"migrationCooldown": "5s"})
        namespace = await simulated.make_namespace()
        await simulated.admin.create(VMIS, vmi("db1", namespace))
        async with (
            running(
                "--config", config, "--kubeconfig", logging_in(tmp_path, simulated.url)
            ) as program,
            aiohttp.ClientSession() as session,
        ):
            started = await program.logged("started")
            query = started["query"][0]
            await ready(session, query)
            etag, told = "", []

            async def next_change() -> None:
                nonlocal etag
                async with (
                    asyncio.timeout(PATIENCE),
                    session.get(
                        f"{query}/v1/blocked?wait=20", headers={"If-None-Match": etag}
                    ) as response,
                ):
                    assert response.status == 200
                    etag = response.headers["ETag"]
                    told.append(
                        [
                            (one["name"], one["checkpoint"], one["reason"])
                            for one in (await response.json())["blocked"]
                        ]
                    )

            await next_change()
            now = simulated._clock().timestamp()  # noqa: SLF001 (the server's own clock)
            state = {"migrationUid": "m1", "startTimestamp": rfc3339(now - 1)}
            for change in (state, state | {"endTimestamp": rfc3339(now), "completed": True}):
                await simulated.admin.merge(
                    VMIS, namespace, "db1", {"status": {"migrationState": change}}
                )
                await next_change()
            await next_change()
            await program.terminated()

        assert told == [
            [],
            [("db1", "filter", "migration_in_progress")],
            [("db1", "preEviction", "cooldown")],
            [],
        ]
        assert program.events("migration_began")[0]["kubevirt.vm.name"] == "db1"


class TestForms:
    """The log flags."""

    async def test_json_lines_are_objects(self, tmp_path: Path) -> None:
        """Every line is one object with an event, a level and an instant."""
        _, program = await finished(
            "--log-format", "json", "--kubeconfig", str(tmp_path / "none"), "--log-level", "debug"
        )

        assert program.logs
        for line in map(json.loads, program.logs):
            assert {"event", "level", "timestamp"} <= set(line)

    async def test_console_lines_are_words(self, tmp_path: Path) -> None:
        """On request the lines are for people, without colours where it is no terminal."""
        _, program = await finished(
            "--log-format", "console", "--kubeconfig", str(tmp_path / "none")
        )

        assert "stopped" in program.written
        assert not program.written.startswith("{")
        assert "\x1b" not in program.written

    async def test_the_level_silences(self, simulated: SimulatedStage, tmp_path: Path) -> None:
        """At level error only what ends the program is told."""
        simulated.server.answer(VMIS.plural, 404)
        code, program = await finished(
            "--config",
            configured(tmp_path),
            "--kubeconfig",
            logging_in(tmp_path, simulated.url),
            "--log-level",
            "error",
        )

        assert code == Exit.KUBEVIRT_MISSING
        assert [line["event"] for line in map(json.loads, program.logs)] == ["stopped"]


class TestDemo:
    """`python -m exporter demo`."""

    async def test_answers_within_seconds(self, tmp_path: Path) -> None:
        """The simulated cluster is there: blocked VMIs, verdicts, reasons, metrics, the page."""
        async with (
            running(
                *("demo", "--config", configured(tmp_path)),
                *("--log-format", "json", "--log-level", "info"),
            ) as program,
            aiohttp.ClientSession() as session,
        ):
            started = await program.logged("started")
            query, metrics = started["query"][0], started["metrics"][0]
            await ready(session, query)
            async with session.get(f"{query}/v1/blocked?checkpoint=preEviction") as response:
                first = (await response.json())["blocked"][0]
            async with session.post(
                f"{query}/v1/verdicts",
                json={
                    "checkpoint": first["checkpoint"],
                    "candidates": [{"namespace": first["namespace"], "name": first["name"]}],
                },
            ) as response:
                verdict = (await response.json())["verdicts"][0]
            place = f"{first['namespace']}/{first['name']}"
            async with session.get(f"{query}/v1/vmis/{place}") as response:
                explained = await response.json()
            async with session.get(f"{metrics}/metrics") as response:
                exposition = await response.text()
            async with session.get(f"{metrics}/") as response:
                page = await response.text()
            code = await program.terminated()

        assert verdict["known"]
        assert not verdict["allowed"]
        assert any(rule["blocks"] for rule in explained["rules"])
        assert "descheduler_kubevirt_eviction_blocks_total{" in exposition
        assert "Synced, last contact" in page
        assert code == Exit.OK
        linted = subprocess.run(
            [find_binary("promtool"), "check", "metrics"],
            input=exposition,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")
