"""The table of logins (`tests/data/logins`), and what each of three clients makes of a row."""

import base64
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import aiohttp
import pytest
import yaml

from exporter.kube.client import ApiError, ApiServer
from exporter.kube.kubeconfig import NoCredentials
from exporter.kube.login import Login
from tests.support.capture import Capture, capturing


DATA = Path(__file__).parents[1] / "data" / "logins"
TABLE = DATA / "table.yaml"
ANSWERS = DATA / "answers.json"
"""What client-go and kubectl made of each row: `make test` compares with this."""
_FILES = ("ca", "other", "middle", "alone", "old-ca", "client")


@dataclass(frozen=True)
class Row:
    """One login: files and environment. See the head of the table."""

    name: str
    files: Mapping[str, str]
    environment: Mapping[str, str]
    arguments: list[str]
    certificate: str
    ours: str
    """Why our answer differs, if it does."""


@dataclass
class Outcome:
    """What a client did: it was refused, it failed to connect, or it sent a request."""

    refused: bool = False
    seen: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    def write(self) -> dict[str, Any]:
        """The outcome as it is recorded: without the message."""
        return {"refused": True} if self.refused else self.seen


def read_rows() -> list[Row]:
    """The rows of the table."""
    table = yaml.safe_load(TABLE.read_text())
    return [_read_row(row) for row in table]


def _read_row(row: dict[str, Any]) -> Row:
    files = {name: _write(content) for name, content in row.get("files", {}).items()}
    if "config" not in files and row.get("config", "generated") is not None:
        files["config"] = _write(_make_config(row))
    return Row(
        name=row["name"],
        files=files,
        environment={"KUBECONFIG": "$DIR/config", **row.get("env", {})},
        arguments=[] if "flag" not in row else ["--kubeconfig", row["flag"]],
        certificate=row.get("server", "server"),
        ours=row.get("ours", ""),
    )


def _make_config(row: dict[str, Any]) -> dict[str, Any]:
    """A kubeconfig with the row's cluster, user and context."""
    cluster = {"server": "$SERVER", "certificate-authority-data": "$CA", **row.get("cluster", {})}
    context = {"cluster": "here", "user": "me", **row.get("context", {})}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "now",
        "clusters": [{"name": "here", "cluster": {k: v for k, v in cluster.items() if v != "-"}}],
        "users": [{"name": "me", "user": row.get("user", {"token": "t0ken"})}],
        "contexts": [{"name": "now", "context": {k: v for k, v in context.items() if v != "-"}}],
        **row.get("top", {}),
    }


def _write(content: Any) -> str:
    return content if isinstance(content, str) else yaml.safe_dump(content)


class Stand:
    """A folder with a row's files, and the server to which its clients connect."""

    def __init__(self, row: Row, folder: Path, certificates: Path, capture: Capture) -> None:
        self.row, self.folder, self.capture = row, folder, capture
        self._values = {
            "DIR": str(folder),
            "PORT": str(capture.port),
            "SERVER": f"https://127.0.0.1:{capture.port}",
            **{
                name.upper().replace("-", "_"): _encode(certificates / f"{name}.crt")
                for name in _FILES
            },
            "KEY": _encode(certificates / "client.key"),
            "OTHER_KEY": _encode(certificates / "other.key"),
            "LOCKED_KEY": _encode(certificates / "locked.key"),
        }
        self._values["CERT"] = self._values["CLIENT"]
        self._values["SERVER_CERT"] = _encode(certificates / "server.crt")
        folder.mkdir(parents=True)
        (folder / "home").mkdir()
        for name, content in row.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.fill(content), newline="")
            if content.startswith("#!"):
                path.chmod(0o700)
        for source in certificates.glob("*.[ck]*"):
            (folder / source.name).write_bytes(source.read_bytes())

    def fill(self, text: str) -> str:
        """The text with the values of this stand."""
        return Template(text).safe_substitute(self._values)

    @property
    def environment(self) -> dict[str, str]:
        """The row's environment, and nothing else."""
        filled = {name: self.fill(value) for name, value in self.row.environment.items()}
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder / "home"), **filled}

    @property
    def arguments(self) -> list[str]:
        return [self.fill(argument) for argument in self.row.arguments]

    def read_outcome(self, dialled: list[str], message: str) -> Outcome:
        """What the server has seen, without what differs from run to run."""
        if not dialled and not self.capture.requests and not self.capture.proxied:
            return Outcome(refused=True, message=message)
        seen: dict[str, Any] = {}
        if self.capture.requests:
            seen["request"] = self.capture.requests[0]
        else:
            seen["failed"] = True
        if self.capture.proxied:
            seen["proxied"] = self.capture.proxied[0]
        if dialled:
            seen["dialled"] = dialled[0]
        asked = self.folder / "asked"
        if asked.exists():
            seen["plugin"] = [_normalize(line) for line in asked.read_text().splitlines() if line]
        text = json.dumps(seen)
        for value, name in (
            (str(self.folder), "$DIR"),
            (f":{self.capture.port}", ":$PORT"),
            (self._values["CA"], "$CA"),
        ):
            text = text.replace(value, name)
        return Outcome(seen=json.loads(text), message=message)


def _encode(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _normalize(line: str) -> str:
    """A line, with the keys in order if it is a JSON object."""
    return json.dumps(json.loads(line), sort_keys=True) if line.startswith("{") else line


def ask_peer(program: Path, row: Row, folder: Path, certificates: Path) -> Outcome:
    """What the program with client-go does."""
    with capturing(certificates, row.certificate) as capture:
        stand = Stand(row, folder, certificates, capture)
        done = subprocess.run(
            [program, *stand.arguments],
            env=stand.environment | {"CAPTURE": f"127.0.0.1:{capture.port}"},
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return stand.read_outcome(done.stdout.split(), done.stderr)


def ask_kubectl(kubectl: Path, row: Row, folder: Path, certificates: Path) -> Outcome:
    """What kubectl does. It needs a row whose addresses exist."""
    with capturing(certificates, row.certificate) as capture:
        stand = Stand(row, folder, certificates, capture)
        done = subprocess.run(
            [kubectl, *stand.arguments, "get", "--raw", "/probe"],
            env=stand.environment, cwd=folder, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return stand.read_outcome([], done.stderr)


async def ask_ours(
    row: Row, folder: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> Outcome:
    """What the exporter's client does, whose connections go to the server of the row."""
    dialled: list[str] = []
    with capturing(certificates, row.certificate) as capture:
        stand = Stand(row, folder, certificates, capture)
        _redirect(monkeypatch, capture.port, dialled)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(os, "environ", stand.environment)
        arguments = stand.arguments
        login = Login(kubeconfig=Path(arguments[1]) if arguments else None)
        message = ""
        try:
            async with ApiServer(login, read_timeout=5.0) as api:
                await api.log_in()
                await api._send("GET", "/probe")  # noqa: SLF001 (a path of no resource)
        except (ApiError, NoCredentials) as error:
            message = f"{type(error).__name__}: {error}"
        return stand.read_outcome(dialled, message)


def _redirect(monkeypatch: pytest.MonkeyPatch, port: int, dialled: list[str]) -> None:
    """Connect aiohttp to this port, whatever the address, and note the address."""

    async def resolve(_: object, host: str, port: int, **__: object) -> list[dict[str, Any]]:
        shown = f"[{host}]" if ":" in host else host
        dialled.append(f"{shown}:{port}")
        return [
            {
                "hostname": host, "host": "127.0.0.1", "port": target, "family": 2, "proto": 0,
                "flags": 0,
            }
        ]  # fmt: skip

    target = port
    monkeypatch.setattr(aiohttp.TCPConnector, "_resolve_host", resolve)
