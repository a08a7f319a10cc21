"""No secret is ever printed: a marker in each place that can hold one, with each key broken."""

import asyncio
import base64
import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from exporter.cli.check import check
from exporter.errors import CommandFailed, Exit
from exporter.kube.kubeconfig import NoCredentials
from tests.cluster import PATIENCE
from tests.program.waiting import wait_until
from tests.support.api_servers import SimulatedStage
from tests.support.program import Program, program
from tests.support.relay import Gate


MARKER = "s3cr3t m4rk3r/1"
VERSION = "client.authentication.k8s.io/v1"
SHOWN = (
    MARKER,
    quote(MARKER),
    quote(MARKER, safe=""),
    base64.b64encode(MARKER.encode()).decode().rstrip("="),
    base64.b64encode(f"ann:{MARKER}".encode()).decode().rstrip("="),
)
"""The ways in which the marker could be printed."""
EXTENSION = "client.authentication.k8s.io/exec"
ENCODED = base64.b64encode(MARKER.encode()).decode()
PLUGIN = '#!/bin/sh\ncat "$(dirname "$0")/answer"\n'
OIDC = {"idp-issuer-url": "https://127.0.0.1:1", "client-id": "me"}
EXEC = {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}


@dataclass(frozen=True)
class Place:
    """Where the marker is: in a cluster, a user, a plugin's answer, a file or the environment."""

    name: str
    cluster: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    token: str = "t0ken"


PASSWORD = f"ann:{quote(MARKER)}@"


def _certificate(key: str, certificate: str) -> dict[str, Any]:
    return {"client-key-data": key, "client-certificate-data": certificate}


def _oidc(key: str) -> dict[str, Any]:
    return {"auth-provider": {"name": "oidc", "config": OIDC | {key: MARKER}}}


PLACES = (
    Place("the server's URL", cluster={"server": f"https://{PASSWORD}$"}),
    Place("proxy-url", cluster={"proxy-url": f"http://{PASSWORD}127.0.0.1:1"}),
    Place("proxy-url with SOCKS", cluster={"proxy-url": f"socks5://{PASSWORD}h"}),
    Place("proxy-url that is no URL", cluster={"proxy-url": f"http://ann:{MARKER}@h"}),
    Place("a token", user={"token": MARKER}),
    Place("a token in two lines", user={"token": f"{MARKER}\n{MARKER}"}),
    Place("a token's file", user={"tokenFile": "token"}, token=MARKER),
    Place("a password", user={"username": "ann", "password": MARKER}),
    Place("client-key-data", user=_certificate(ENCODED, "QUFB")),
    Place("client-certificate-data", user=_certificate("QUFB", ENCODED)),
    Place("a plugin's argument", user={"exec": EXEC | {"args": [MARKER]}}),
    Place("a plugin's variable", user={"exec": EXEC | {"env": [{"name": "A", "value": MARKER}]}}),
    Place(
        "an extension for a plugin",
        cluster={"extensions": [{"name": EXTENSION, "extension": MARKER}]},
        user={"exec": EXEC | {"provideClusterInfo": True}},
    ),
    Place("a plugin's token", user={"exec": EXEC}, answer={"token": MARKER}),
    Place("a plugin's token in two lines", user={"exec": EXEC}, answer={"token": f"{MARKER}\n"}),
    Place(
        "a plugin's key",
        user={"exec": EXEC},
        answer={"clientCertificateData": "x", "clientKeyData": MARKER},
    ),
    Place("OIDC's client-secret", user=_oidc("client-secret")),
    Place("OIDC's id-token", user=_oidc("id-token")),
    Place("OIDC's refresh-token", user=_oidc("refresh-token")),
    Place("HTTPS_PROXY", environment={"HTTPS_PROXY": f"http://{PASSWORD}127.0.0.1:1"}),
    Place("HTTPS_PROXY with SOCKS", environment={"HTTPS_PROXY": f"socks5://{PASSWORD}h"}),
)


class Kubeconfig:
    """A folder with a place's kubeconfig, and the other files that it names."""

    def __init__(self, folder: Path, place: Place, server: str, authority: Path) -> None:
        self.path = folder / "config"
        host = server.removeprefix("https://")
        cluster = {"server": server, "certificate-authority": str(authority), **place.cluster}
        cluster["server"] = cluster["server"].replace("$", host)
        self.document: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "now",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": place.user}],
            "contexts": [{"name": "now", "context": {"cluster": "here", "user": "me"}}],
        }
        status = place.answer or {"token": "t0ken"}
        self.answer = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
        (folder / "token").write_text(place.token)
        (folder / "plugin").write_text(PLUGIN)
        (folder / "plugin").chmod(0o700)
        self.write(yaml.safe_dump(self.document), json.dumps(self.answer))

    def write(self, config: str, answer: str) -> None:
        """Write the kubeconfig and what the plugin answers."""
        self.path.write_text(config)
        self.path.with_name("answer").write_text(answer)

    def break_keys(self, place: Place, share: float) -> Iterator[str]:
        """Break this share of the keys, each in several ways; yields which."""
        config, answer = yaml.safe_dump(self.document), json.dumps(self.answer)
        sample = random.Random(place.name)
        for name, broken in _break_each(self.document):
            if sample.random() < share:
                self.write(yaml.safe_dump(broken), answer)
                yield name
        for name, broken in _break_each(self.answer if place.answer else {}):
            if sample.random() < share:
                self.write(config, json.dumps(broken))
                yield f"answer {name}"
        for cut in range(40, len(config), 211):
            self.write(config[:cut], answer)
            yield f"the first {cut} bytes"
        self.write(config + f"\n{MARKER}: [\n", answer)
        yield "a wrong last line"


def _break_each(document: Any) -> Iterator[tuple[str, Any]]:
    """The document with each value in turn removed, or replaced by others with the same content."""
    for path in _find_paths(document):
        for name, change in _CHANGES.items():
            broken = copy.deepcopy(document)
            parent = broken
            for key in path[:-1]:
                parent = parent[key]
            if name == "without" and isinstance(parent, dict):
                del parent[path[-1]]
            else:
                parent[path[-1]] = change(parent[path[-1]])
            yield f"{name} {'.'.join(map(str, path))}", broken


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "without": lambda _: None,
    "a list of": lambda value: [value],
    "a prefix before": lambda value: f"%{value}" if isinstance(value, str) else 7,
}


def _find_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in items:
        yield (*path, key)
        if isinstance(below, dict | list):
            yield from _find_paths(below, (*path, key))


def _find_leaks(text: str) -> list[str]:
    return [shown for shown in SHOWN if shown in text]


def _write_settings(tmp_path: Path) -> Path:
    """A configuration with which `check` must ask the cluster."""
    path = tmp_path / "exporter.yaml"
    match = {"vmiLabels": {"tier": "gold"}}
    path.write_text(yaml.safe_dump({"policy": {"overrides": [{"name": "gold", "match": match}]}}))
    return path


@pytest.mark.parametrize(
    "share", [pytest.param(0.2, id="small"), pytest.param(1.0, id="soak", marks=pytest.mark.soak)]
)
def test_no_broken_key_shows_a_secret(
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    prove: Callable[[str], None],
    *,
    share: float,
) -> None:
    """`check` shows no secret, on either stream, wherever the secret is and whatever is wrong."""
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    settings = _write_settings(tmp_path)
    before, refused, keys = dict(os.environ), 0, 0
    for number, place in enumerate(PLACES):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(os, "environ", {**before, **place.environment})
        kubeconfig = Kubeconfig(folder, place, "https://127.0.0.1:1", certificates / "ca.crt")
        for broken in kubeconfig.break_keys(place, share):
            keys += 1
            with pytest.raises(CommandFailed) as failed:
                check(settings, ("shop", "a"), kubeconfig.path)
            refused += isinstance(failed.value, NoCredentials)
            shown = "".join((*capfd.readouterr(), str(failed.value)))
            assert not _find_leaks(shown), f"{place.name}, {broken}: {shown}"
    assert refused > keys / 2
    prove(f"secrets: {len(PLACES)} places, {keys} broken keys, {refused} refusals, none is shown")


@pytest.mark.parametrize("place", PLACES, ids=[place.name for place in PLACES])
async def test_no_command_shows_a_secret(
    simulated: SimulatedStage, certificates: Path, tmp_path: Path, place: Place
) -> None:
    """The log, /v1/status and `record` show no secret, also if the server refuses it."""
    simulated.server.tokens = ["another"]
    async with Gate(simulated.url, certificates) as gate:
        kubeconfig = Kubeconfig(tmp_path, place, gate.url, certificates / "ca.crt")
        login = ("--kubeconfig", str(kubeconfig.path))
        asked = (*login, "--log-level", "debug")
        async with program(tmp_path, *asked, environment=place.environment) as exporter:
            shown = await _read_status(exporter)
            shown += exporter.output
        recording = ("record", "--output", str(tmp_path / "out"), "--for", "1s", *login)
        code, printed = await _run(*recording, **place.environment)
    assert code in (Exit.NOT_SYNCED, Exit.NO_CREDENTIALS)
    assert "why" in shown
    assert not _find_leaks(shown + printed)


async def _read_status(exporter: Program) -> str:
    """/v1/status once a watch has failed, or nothing if the program ends."""
    await wait_until(
        lambda: exporter.process.returncode is not None or bool(exporter.events("watch_broke")),
        what="an end or a failed watch",
    )
    if exporter.process.returncode is not None:
        return ""
    await exporter.listening()
    status = json.dumps(await exporter.until("/v1/status", lambda code, _: code == 200))
    assert "trouble" in status
    await exporter.end()
    return status


async def _run(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of `python -m exporter` with these arguments, and what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "default", "-m", "exporter", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    printed, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode is not None
    return process.returncode, printed.decode()
