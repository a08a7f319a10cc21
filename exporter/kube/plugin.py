"""Runs a login plugin as client-go does (`plugin/pkg/client/auth/exec`)."""

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog
from msgspec import Struct

from exporter.engine.facts.model import Instant, Seconds
from exporter.kube.account import Plugin, is_header
from exporter.kube.go_yaml import read_go_yaml
from exporter.kube.kubeconfig import NoCredentials
from exporter.kube.objects.instants import parse_instant
from exporter.text import clean


LOGIN_TIMEOUT: Seconds = 10.0
"""The time limit of a login by files, or by a plugin that says nothing."""
PERSON_TIMEOUT: Seconds = 300.0
"""The time limit of a plugin that has the terminal, or that has written to its stderr: a person may
have to enter a code in a browser."""
FIRST_WORD: Seconds = 3.0
"""After this time, a log line says which plugin the exporter waits for."""
LONGEST_OUTPUT = 2**20
"""The most bytes that a login plugin may write to each of its outputs."""
LONGEST_LINE = 4096
"""The most characters of a plugin's line in the log: a URL to log in with may be long."""
_PIPE = 2**16

log = structlog.stdlib.get_logger()


@dataclass(frozen=True, repr=False)
class Credential:
    """What a plugin returned: a token, a client certificate with its key, or both."""

    token: str
    certificate: bytes | None
    key: bytes | None
    expires_at: Instant


class _Status(Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: str | None = None


class _ExecCredential(Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    status: _Status | None = None


class _Pipe:
    """A pipe that a plugin writes to; `receive` is called with each part, as it comes."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def close(self, *, read_rest: bool) -> None:
        """Stop reading, even if a child of the plugin keeps the pipe open."""
        rounds = LONGEST_OUTPUT // _PIPE if read_rest else 0
        while rounds and self._read():
            rounds -= 1
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    def _read(self) -> bool:
        """Read a part; whether there may be more."""
        try:
            part = os.read(self._read_end, _PIPE)
        except BlockingIOError:
            return False
        if part:
            self._receive(part)
        else:
            self._loop.remove_reader(self._read_end)
        return bool(part)


class PluginRun:
    """One call of a plugin. Its process ends if `run` is cancelled or takes too long."""

    def __init__(self, plugin: Plugin, environment: Mapping[str, str]) -> None:
        self._plugin, self._exec = plugin, plugin.exec
        self._environment = environment
        self._is_interactive = self._exec.interactive_mode != "Never" and sys.stdin.isatty()
        self._process: asyncio.subprocess.Process | None = None
        self._answer = bytearray()
        self._said = 0
        self._limit: asyncio.Timeout | None = None

    async def run(self) -> Credential:
        """The credential. Raises `NoCredentials` or `TimeoutError`."""
        if self._exec.interactive_mode == "Always" and not self._is_interactive:
            raise self._refuse("exec.interactiveMode is Always: expected a terminal as stdin")
        loop = asyncio.get_running_loop()
        first_word = loop.call_later(FIRST_WORD, self._say_that_it_runs)
        try:
            async with asyncio.timeout(self._patience) as self._limit:
                code = await self._run_process()
        except TimeoutError:
            raise TimeoutError(self._describe(f"took more than {self._patience:g} s")) from None
        finally:
            first_word.cancel()
        if max(len(self._answer), self._said) > LONGEST_OUTPUT:
            raise self._refuse(f"wrote more than {LONGEST_OUTPUT} bytes")
        if code != 0:
            raise self._refuse(f"failed with exit code {code}")
        return self._decode()

    @property
    def _patience(self) -> Seconds:
        """The time limit, which is longer if a person may have to act."""
        return PERSON_TIMEOUT if self._is_interactive or self._said else LOGIN_TIMEOUT

    async def _run_process(self) -> int:
        """Run the process to its end, and return its exit code."""
        cluster = {} if self._plugin.cluster is None else {"cluster": self._plugin.cluster}
        request = {
            "kind": "ExecCredential",
            "apiVersion": self._exec.api_version,
            "spec": {"interactive": self._is_interactive, **cluster},
        }
        own = {variable.name: variable.value for variable in self._exec.env}
        info = {"KUBERNETES_EXEC_INFO": json.dumps(request, separators=(",", ":"))}
        stdout, stderr = _Pipe(self._receive_answer), _Pipe(self._receive_words)
        has_ended = False
        try:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    self._exec.command,
                    *(arg or "" for arg in self._exec.args),
                    env={**self._environment, **own, **info},
                    stdin=None if self._is_interactive else asyncio.subprocess.DEVNULL,
                    stdout=stdout.write_end,
                    stderr=None if self._is_interactive else stderr.write_end,
                    # A plugin that has the terminal must stay in our session.
                    start_new_session=not self._is_interactive,
                )
            except FileNotFoundError:
                hint = clean(self._exec.install_hint)
                why = "not found" + (f"; the kubeconfig's installHint: {hint}" if hint else "")
                raise self._refuse(why) from None
            except (OSError, ValueError) as error:
                fault = isinstance(error, OSError) and error.strerror
                raise self._refuse(f"cannot be run: {fault or 'invalid command'}") from None
            finally:
                os.close(stdout.write_end)
                os.close(stderr.write_end)
            code = await self._process.wait()
            has_ended = True
            return code
        finally:
            if self._process is not None and not has_ended:
                self._kill()
                await self._process.wait()
            stdout.close(read_rest=has_ended)
            stderr.close(read_rest=has_ended)

    def _receive_answer(self, part: bytes) -> None:
        if len(self._answer) <= LONGEST_OUTPUT:
            self._answer += part
        if len(self._answer) > LONGEST_OUTPUT:
            self._kill()

    def _receive_words(self, part: bytes) -> None:
        """Log what the plugin says, and give a person time to act on it."""
        self._said += len(part)
        if self._said > LONGEST_OUTPUT:
            self._kill()
            return
        limit = self._limit
        if limit is not None and not limit.expired() and self._said == len(part):
            limit.reschedule(asyncio.get_running_loop().time() + PERSON_TIMEOUT)
        for line in part.decode(errors="replace").splitlines():
            if line.strip():
                log.warning(
                    "login_plugin_said", plugin=self._exec.command, line=clean(line, LONGEST_LINE)
                )

    def _say_that_it_runs(self) -> None:
        log.warning(
            "login_waits",
            plugin=self._exec.command,
            seconds=FIRST_WORD,
            at_most_seconds=self._patience,
        )

    def _kill(self) -> None:
        """Kill the plugin, and the processes that it has started unless it shares our group."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            if self._is_interactive:
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _decode(self) -> Credential:
        try:
            answer = msgspec.convert(read_go_yaml(bytes(self._answer)), _ExecCredential)
        except ValueError as error:
            raise self._refuse(f"gave no ExecCredential: {error}") from None
        status, version = answer.status or _Status(), self._exec.api_version
        certificate, key = status.client_certificate_data, status.client_key_data
        for is_wrong, why in (
            (
                answer.kind not in ("", "ExecCredential"),
                "gave no ExecCredential: expected this kind",
            ),
            (
                answer.api_version != version,
                f"answered with another apiVersion: expected {version}",
            ),
            (
                bool(certificate) != bool(key),
                "gave only one of clientCertificateData and clientKeyData",
            ),
            (
                not (status.token or certificate),
                "gave no token and no certificate: expected one in status",
            ),
            (
                not is_header(status.token),
                "gave a token with a line break or a control character",
            ),
        ):
            if is_wrong:
                raise self._refuse(why)
        ends = status.expiration_timestamp
        expires_at = math.inf if ends is None else parse_instant(ends)
        if expires_at is None:
            raise self._refuse("gave an expirationTimestamp that is not RFC 3339")
        return Credential(
            token=status.token,
            certificate=certificate.encode() or None,
            key=key.encode() or None,
            expires_at=expires_at,
        )

    def _refuse(self, why: str) -> NoCredentials:
        return NoCredentials(self._describe(why))

    def _describe(self, what: str) -> str:
        return f"{self._plugin.where}: the login plugin {self._exec.command} {what}"
