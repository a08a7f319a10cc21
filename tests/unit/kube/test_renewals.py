"""Logins that are renewed: nothing is left behind, and no request fails."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from exporter.engine.facts.model import Resource
from exporter.kube.client import ApiServer, Unconnected
from exporter.kube.login import Login
from exporter.text import write_instant
from tests.cluster import poll
from tests.program.waiting import wait_until
from tests.support.capture import Capture, capturing
from tests.support.certificates import write_certificate


BEGAN = 1_800_000_000.0
VERSION = "client.authentication.k8s.io/v1"


@dataclass
class Setup:
    """A kubeconfig with a plugin, whose next answer a test writes, and a clock."""

    folder: Path
    capture: Capture
    now: float = BEGAN

    @property
    def login(self) -> Login:
        return Login(kubeconfig=self.folder / "config")

    def answer(self, **status: object) -> None:
        """What the plugin answers from now on."""
        credential = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
        (self.folder / "answer").write_text(json.dumps(credential))

    def answer_token(self, token: str, lasts: float) -> None:
        """The plugin answers with a token that expires."""
        self.answer(token=token, expirationTimestamp=write_instant(self.now + lasts))

    def connect(self) -> ApiServer:
        return ApiServer(self.login, read_timeout=5.0, clock=lambda: self.now)

    async def ask(self, api: ApiServer) -> str:
        """Send a request, and return the token with which it came."""
        await api.read(Resource.LEASES, "shop", "lease")
        return str(self.capture.requests[-1].get("authorization", "")).removeprefix("Bearer ")


@pytest.fixture
def setup(certificates: Path, tmp_path: Path) -> Iterator[Setup]:
    """A server that takes every certificate of its CA."""
    folder = tmp_path / "login"
    shutil.copytree(certificates, folder)
    plugin = folder / "plugin"
    plugin.write_text('#!/bin/sh\ncat "$(dirname "$0")/answer"\n')
    plugin.chmod(0o700)
    with capturing(folder) as capture:
        server = f"https://127.0.0.1:{capture.port}"
        command = {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}
        document = {
            "current-context": "now",
            "clusters": [
                {"name": "here", "cluster": {"server": server, "certificate-authority": "ca.crt"}}
            ],
            "users": [{"name": "me", "user": {"exec": command}}],
            "contexts": [{"name": "now", "context": {"cluster": "here", "user": "me"}}],
        }
        (folder / "config").write_text(yaml.safe_dump(document))
        yield Setup(folder, capture)


def _count_open() -> tuple[int, int]:
    """The numbers of our open files and of the files in the folder for temporary files."""
    files = sum(len(names) for *_, names in os.walk(tempfile.gettempdir()))
    return len(list(Path("/proc/self/fd").iterdir())), files


@pytest.mark.parametrize("times", [30, pytest.param(2000, marks=pytest.mark.soak)])
async def test_nothing_is_left_of_a_login(
    setup: Setup, times: int, prove: Callable[[str], None]
) -> None:
    """After many logins with a new certificate each there are no more open files than after one."""
    after_one = (0, 0)
    async with setup.connect() as api:
        for number in range(times):
            name = f"client-{number}"
            write_certificate(setup.folder, name)
            pair = [(setup.folder / f"{name}.{end}") for end in ("crt", "key")]
            certificate, key = (path.read_text() for path in pair)
            for path in pair:
                path.unlink()
            setup.answer(clientCertificateData=certificate, clientKeyData=key)
            await api.renew()
            await setup.ask(api)
            assert setup.capture.requests[-1]["certificate"] == name
            if number == 0:
                after_one = _count_open()

        await wait_until(
            lambda: _count_open() <= after_one, what=f"{after_one} open and temporary files"
        )
    prove(f"logins with a new certificate each: {times}; open and temporary files {after_one}")


async def test_a_token_is_renewed_before_it_expires(setup: Setup) -> None:
    """It is renewed a minute earlier, while requests still have the old one."""
    setup.answer_token("one", 900.0)
    async with setup.connect() as api:
        assert await setup.ask(api) == "one"
        setup.answer_token("two", 1800.0)
        setup.now += 830.0
        assert await setup.ask(api) == "one"
        setup.now += 15.0
        assert await setup.ask(api) == "one", "the request does not wait for the plugin"

        async def is_renewed() -> bool:
            return await setup.ask(api) == "two"

        await poll(is_renewed, what="the new token")


async def test_a_token_that_has_expired_is_not_sent(setup: Setup) -> None:
    """After a pause in which it expired, the next request waits for the new one."""
    setup.answer_token("one", 900.0)
    async with setup.connect() as api:
        assert await setup.ask(api) == "one"
        setup.answer_token("two", 1800.0)
        setup.now += 1000.0
        assert await setup.ask(api) == "two"


async def test_a_short_token_is_not_renewed_at_once(setup: Setup) -> None:
    """A token of 20 s is used for three quarters of its time."""
    setup.answer_token("one", 20.0)
    async with setup.connect() as api:
        setup_of_two = [await setup.ask(api)]
        setup.answer_token("two", 60.0)
        setup.now += 14.0
        setup_of_two.append(await setup.ask(api))
        await asyncio.sleep(0)
        setup_of_two.append(await setup.ask(api))
    assert setup_of_two == ["one"] * 3


async def test_a_renewal_that_fails(setup: Setup) -> None:
    """The old token stays in use while it is valid; then requests fail with the reason."""
    setup.answer_token("one", 900.0)
    async with setup.connect() as api:
        assert await setup.ask(api) == "one"
        (setup.folder / "answer").write_text("none")
        setup.now += 850.0
        for _ in range(3):
            assert await setup.ask(api) == "one"
        setup.now += 100.0
        with pytest.raises(Unconnected, match="gave no ExecCredential"):
            await setup.ask(api)
        setup.answer_token("two", 900.0)
        assert await setup.ask(api) == "two"
