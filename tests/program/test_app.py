"""The whole program as a process of its own, against the simulated API server."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from exporter.errors import Exit
from tests.cluster import PATIENCE, VMIS
from tests.cluster.users import open_kubeconfig, secure_kubeconfig
from tests.program.waiting import wait_until
from tests.support.api_servers import SimulatedStage
from tests.support.program import ANYWHERE, Program, program
from tests.support.relay import Gate


TOKEN = "a-secret-token-that-nobody-may-read"
PORTS = ANYWHERE["listen"]
Login: TypeAlias = tuple[str, str]


@pytest.fixture
async def login(
    simulated: SimulatedStage, certificates: Path, tmp_path: Path
) -> AsyncIterator[Login]:
    """The flag `--kubeconfig`, for a file with a token for the simulated API server."""
    async with Gate(simulated.url, certificates) as gate:
        proof = {"token": TOKEN}
        file = secure_kubeconfig(tmp_path / "kubeconfig", gate.url, certificates, proof)
        yield "--kubeconfig", str(file)


async def finished(
    directory: Path, *arguments: str, environment: dict[str, str] | None = None, **config: object
) -> tuple[int, Program]:
    """Run a program that ends by itself; returns its exit code and the program."""
    async with program(directory, *arguments, config=config, environment=environment) as ended:
        return await asyncio.wait_for(ended.process.wait(), PATIENCE), ended


def why(stopped: Program) -> str:
    """The reason in the program's log event `stopped`."""
    return str(stopped.events("stopped")[0]["why"])


class TestExits:
    """The exit codes, and their messages."""

    async def test_without_credentials(self, tmp_path: Path) -> None:
        """Without credentials the exporter exits with 5 before it listens."""
        nowhere = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
        code, stopped = await finished(tmp_path, environment=nowhere)

        assert code == Exit.NO_CREDENTIALS
        assert "service account" in why(stopped)
        assert not stopped.events("started")

    async def test_with_a_kubeconfig_that_cannot_be_used(self, tmp_path: Path) -> None:
        """With an invalid kubeconfig the exporter exits with 5; it logs the path but no content."""
        path = tmp_path / "kubeconfig"
        path.write_text(f"\x00{TOKEN}", encoding="utf-8")
        code, stopped = await finished(tmp_path, "--kubeconfig", str(path))

        assert code == Exit.NO_CREDENTIALS
        assert str(path) in why(stopped)
        assert TOKEN not in stopped.output

    @pytest.mark.parametrize("listener", ["query", "metrics"])
    async def test_where_it_cannot_listen(
        self, login: Login, tmp_path: Path, listener: str
    ) -> None:
        """If a port is in use, the exporter exits with 6 and names the address."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            code, stopped = await finished(tmp_path, *login, listen=PORTS | {listener: address})

        assert code == Exit.CANNOT_LISTEN
        assert address in why(stopped)

    async def test_where_the_demo_cannot_listen(self, tmp_path: Path) -> None:
        """The demo exits with 6 if the directory of its socket is missing."""
        listen = PORTS | {"query": f"unix:{tmp_path}/none/q.sock"}
        code, stopped = await finished(tmp_path, "demo", listen=listen)

        assert code == Exit.CANNOT_LISTEN
        assert "none/q.sock" in why(stopped)

    @pytest.mark.parametrize("answer", [401, 403], ids=["unauthorized", "forbidden"])
    async def test_where_it_may_not_list(
        self, simulated: SimulatedStage, login: Login, tmp_path: Path, answer: int
    ) -> None:
        """If the API server answers 401 or 403, the exporter exits with 3 and logs no token."""
        if answer == 401:
            simulated.server.tokens = frozenset({"another"})
        else:
            simulated.server.answer(VMIS.plural, 403)
        code, stopped = await finished(
            tmp_path, *login, "--log-level", "debug", kube={"syncTimeout": "1s"}
        )

        assert code == Exit.NOT_SYNCED
        assert str(answer) in why(stopped)
        assert stopped.events("watch_broke")
        assert TOKEN not in stopped.output

    async def test_where_nothing_answers(self, tmp_path: Path) -> None:
        """Without an API server the exporter exits with 3, and names the last error."""
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        login = ("--kubeconfig", str(open_kubeconfig(tmp_path / "kubeconfig", url)))
        code, stopped = await finished(tmp_path, *login, kube={"syncTimeout": "500ms"})

        assert code == Exit.NOT_SYNCED
        assert "virtualmachineinstances" in why(stopped)
        assert "Connect" in why(stopped)

    async def test_where_kubevirt_is_missing(
        self, simulated: SimulatedStage, login: Login, tmp_path: Path
    ) -> None:
        """Without KubeVirt the exporter exits with 4, and logs only how to wait for KubeVirt."""
        simulated.server.answer(VMIS.plural, 404)
        code, stopped = await finished(tmp_path, *login, "--log-level", "error")

        assert code == Exit.KUBEVIRT_MISSING
        assert "kube.waitForKubeVirt" in why(stopped)
        assert [line["event"] for line in stopped.events()] == ["stopped"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
    async def test_by_a_signal_before_the_sync(
        self, simulated: SimulatedStage, login: Login, tmp_path: Path, number: signal.Signals
    ) -> None:
        """SIGTERM and Ctrl-C end the exporter with 0 while it waits for KubeVirt."""
        simulated.server.answer(VMIS.plural, 404)
        async with program(tmp_path, *login, config={"kube": {"waitForKubeVirt": True}}) as waiting:
            await wait_until(
                lambda: waiting.events("waiting_for_kubevirt"), what="waiting for KubeVirt"
            )
            assert await waiting.end(number) == Exit.OK
        assert "Traceback" not in waiting.output

    async def test_while_the_api_server_hangs(self, login: Login, tmp_path: Path) -> None:
        """SIGTERM ends the exporter without a warning while the API server does nothing."""
        async with program(tmp_path, *login) as exporter:
            await exporter.ready()
            exporter.process.send_signal(signal.SIGTERM)
            # The API server runs in this process, which waits and serves nothing.
            with suppress(ChildProcessError):  # asyncio's thread has waited for it before
                os.waitid(os.P_PID, exporter.process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
            assert await asyncio.wait_for(exporter.process.wait(), PATIENCE) == Exit.OK
        assert "Traceback" not in exporter.output


async def test_serves_and_ends(simulated: SimulatedStage, login: Login, tmp_path: Path) -> None:
    """Both listeners answer; after SIGTERM the exporter answers its long polls and exits with 0."""
    simulated.server.tokens = frozenset({TOKEN})
    socket_path = f"{tmp_path}/q.sock"
    listen = PORTS | {"query": [PORTS["query"], f"unix:{socket_path}"]}
    async with (
        program(tmp_path, *login, config={"listen": listen}) as exporter,
        aiohttp.ClientSession() as session,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket_path)) as on_socket,
    ):
        await exporter.ready()
        query, metrics = exporter.query, exporter.metrics
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
        synced = "kubevirt_eviction_exporter_synced"
        assert await exporter.sample(synced, resource=VMIS.plural) == 1
        code = await exporter.end()
        async with await held as response:
            last = response.status

    assert exporter.events("started")[0]["query"][1] == f"unix:{socket_path}"
    assert [verdict["known"] for verdict in verdicts] == [False]
    assert hidden == 404
    assert last == 304
    assert code == Exit.OK
    assert exporter.events()[-1]["event"] == "stopping"
    assert TOKEN not in exporter.output
