"""Logs in to the Kubernetes API: finds the credentials, and checks what they contain.

kubernetes_asyncio reads them (in-cluster, kubeconfig, client certificates, exec plugins). Whatever
it raises for them becomes `NoCredentials`.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from exporter.credentials import trim_token
from exporter.errors import MALFORMED, CommandFailed, Exit
from exporter.kube.lean_import import (
    ConfigException,
    Configuration,
    ExecProvider,
    credentials,
    kube_config,
)
from exporter.logs import Trouble
from exporter.text import clean


LONGEST_OUTPUT = 2**20
"""The most bytes that a login plugin may write to each of its outputs."""
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TOKEN = "BearerToken"  # noqa: S105 (the name under which kubernetes_asyncio keeps the token)
_MALFORMED = AssertionError, AttributeError, LookupError, TypeError, ValueError, *MALFORMED
"""kubernetes_asyncio raises these for a kubeconfig with wrong fields or broken base64."""


class NoCredentials(CommandFailed):
    """There are no usable credentials. The message says what was tried."""

    exit_code = Exit.NO_CREDENTIALS


@dataclass(frozen=True)
class Login:
    """Where to log in: a kubeconfig file, or the URL of a server that needs no credentials.

    If neither is set, the pod's service account is used, or else the default kubeconfig.
    """

    kubeconfig: Path | None = None
    url: str | None = None


async def log_in(login: Login) -> Configuration:
    """Load the client configuration. Raises `NoCredentials`.

    If this is cancelled, the process of a login plugin ends too.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # unlimited: each watch keeps a connection open
    if login.url is not None:
        configuration.host = login.url
        return configuration
    file = None if login.kubeconfig is None else str(login.kubeconfig)
    where = file or ""
    if login.kubeconfig is None:
        try:
            _load_service_account(configuration)
        except (ConfigException, OSError, ValueError) as error:
            where = f"no service account of a pod ({error}), and the default kubeconfig"
        else:
            return configuration
    elif not login.kubeconfig.exists():
        raise NoCredentials(f"{where}: there is no such kubeconfig file")
    try:
        await asyncio.to_thread(_check_files, file)
        loader = await credentials.load_kube_config(
            config_file=file, client_configuration=configuration, persist_config=False
        )
        _trim_token(configuration)
        if _TOKEN not in configuration.api_key:
            _check_token_file(file, loader.current_context)
    except (ConfigException, OSError, yaml.YAMLError, *_MALFORMED) as error:
        raise NoCredentials(f"{where} cannot be used: {why_of(error)}") from error
    return configuration


def find_namespace(login: Login) -> str:
    """The exporter's own namespace: that of its pod, or else of the kubeconfig's context.

    Needs a successful `log_in`.
    """
    if login.url is None:
        if login.kubeconfig is None and _POD_NAMESPACE.is_file():
            return _POD_NAMESPACE.read_text(encoding="ascii").strip()
        file = None if login.kubeconfig is None else str(login.kubeconfig)
        _, context = credentials.list_kube_config_contexts(file)
        if context is not None:
            return str(context["context"].get("namespace") or "default")
    return "default"


def _check_files(file: str | None) -> None:
    """Raises `ConfigException` for a kubeconfig or `tokenFile` that is not a regular file.

    A read of a FIFO may never end, and kubernetes_asyncio reads in the event loop.
    """
    location = file or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    # As the merger below finds the files: `Path.expanduser` raises an error for an unknown user.
    places = [Path(os.path.expanduser(one)) for one in location.split(os.pathsep) if one]  # noqa: PTH111
    found = [path for path in places if path.exists()]
    for path in found:
        _check_regular(path)
    merged = kube_config.KubeConfigMerger(location).config if found else None
    for user in [] if merged is None else merged.value["users"]:
        named = user.value["user"].get("tokenFile")
        if named is not None:
            _check_regular(Path(user.path).parent / named)


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ConfigException(f"{path} is not a regular file")


def _check_token_file(file: str | None, context: Any) -> None:
    """Raises `ConfigException` if the user of this context, who has no token, has a `tokenFile`.

    Then the file is empty. kubernetes_asyncio would send no token; client-go refuses it too.
    """
    merged = kube_config.KubeConfigMerger(file or kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    users = merged.config["users"] if merged.config is not None else None
    name = context["context"].get("user")
    user = None if users is None else users.get_with_name(name, safe=True)
    if user is not None and "tokenFile" in user["user"]:
        raise ConfigException("its tokenFile is empty")


def _load_service_account(configuration: Configuration) -> None:
    """Use the pod's service account. A new token that cannot be used does not replace the old one.

    The kubelet renews the token's file; kubernetes_asyncio reads it again after a minute. Raises
    `ConfigException`, `OSError` or `ValueError`.
    """
    credentials.load_incluster_config(  # type: ignore[no-untyped-call]
        client_configuration=configuration
    )
    _trim_token(configuration)
    read_again: Any = configuration.refresh_api_key_hook
    trouble = Trouble("token_not_renewed")

    def renew_token(configuration: Configuration) -> None:
        known = configuration.api_key[_TOKEN]
        try:
            read_again(configuration)
            _trim_token(configuration)
        except (ConfigException, OSError, ValueError) as error:
            configuration.api_key[_TOKEN] = known
            trouble.note(why_of(error))
        else:
            trouble.end()

    configuration.refresh_api_key_hook = renew_token


def _trim_token(configuration: Configuration) -> None:
    """Trim the token as client-go does. Raises `ValueError` if no header may contain it."""
    value = configuration.api_key.get(_TOKEN)
    if value is not None:
        scheme, _, token = value.partition(" ")
        configuration.api_key[_TOKEN] = f"{scheme} {trim_token(token)}"


class _ExecCredential(Struct):
    apiVersion: str  # noqa: N815
    status: dict[str, object]


class ExecPlugin(ExecProvider):
    """A login plugin. Its process and the processes that it has started end if `run` is cancelled.

    The plugin of kubernetes_asyncio would run on, and its pipes would stay open.
    """

    async def run(self, previous_response: str | None = None) -> Any:
        """The status of the plugin's ExecCredential. Raises `ConfigException` or `OSError`."""
        del previous_response  # no caller has one
        spec = {"interactive": sys.stdout.isatty()}
        request = {"apiVersion": self.api_version, "kind": "ExecCredential", "spec": spec}
        process = await asyncio.create_subprocess_exec(
            *self.args,
            env={**self.env, "KUBERNETES_EXEC_INFO": json.dumps(request)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.gather(
                _read(process, process.stdout), _read(process, process.stderr)
            )
            await process.wait()
        except asyncio.CancelledError:
            _kill(process)
            await process.wait()
            raise
        if max(len(output), len(errors)) > LONGEST_OUTPUT:
            raise ConfigException(f"{self.args[0]} wrote more than {LONGEST_OUTPUT} bytes")
        if process.returncode != 0:
            said = clean(errors.decode(errors="replace"))
            raise ConfigException(f"{self.args[0]} returned {process.returncode}: {said}")
        try:
            credential = msgspec.json.decode(output, type=_ExecCredential)
        except MALFORMED as error:
            raise ConfigException(f"{self.args[0]} gave no ExecCredential: {error}") from error
        if credential.apiVersion != self.api_version:
            expected = f"expected the kubeconfig's apiVersion, {self.api_version}"
            raise ConfigException(f"{self.args[0]}: {expected}, got {credential.apiVersion!r}")
        return credential.status


async def _read(process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None) -> bytes:
    """What a plugin writes. After `LONGEST_OUTPUT` bytes it is killed, and the rest is dropped.

    The stream is read to its end, because asyncio waits for a process until its pipes are closed.
    """
    read = bytearray()
    while stream is not None and (part := await stream.read(LONGEST_OUTPUT)):
        if len(read) <= LONGEST_OUTPUT:
            read += part
        if len(read) > LONGEST_OUTPUT:
            _kill(process)
    return bytes(read)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a plugin and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


kube_config.ExecProvider = ExecPlugin  # type: ignore[attr-defined]


def why_of(error: BaseException) -> str:
    """The type of an error, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
