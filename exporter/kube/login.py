"""Logs in to the Kubernetes API: reads the files, runs a login plugin, and renews tokens.

`account` decides which cluster and user this is.
"""

import asyncio
import math
import os
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import structlog

from exporter.clock import read_elapsed
from exporter.credentials import describe, trim_token
from exporter.engine.facts.model import Instant, Seconds
from exporter.kube.account import Account, choose_account, write_bearer
from exporter.kube.kubeconfig import Merged, NoCredentials, find_files, read_kubeconfigs
from exporter.kube.plugin import LOGIN_TIMEOUT, PluginRun
from exporter.kube.proxies import find_proxy
from exporter.kube.tls import make_context, trust
from exporter.logs import Trouble


TOKEN_READ_EVERY: Seconds = 60.0
"""How often a token's file is read again, as by client-go."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

log = structlog.stdlib.get_logger()


@dataclass(frozen=True)
class Login:
    """Where to log in: a kubeconfig file, or the URL of a server that needs no credentials.

    If neither is set, the pod's service account is used, or else the default kubeconfig.
    """

    kubeconfig: Path | None = None
    url: str | None = None


class TokenFile:
    """A file with a token that may be renewed.

    If it cannot be used, the last token stays in use, or `fallback` if there was none. Raises
    `NoCredentials` if there is no fallback either.
    """

    def __init__(self, path: Path, fallback: str | None, where: str) -> None:
        self._path = path
        self._header = fallback
        self._read_at: Seconds | None = None
        self._trouble = Trouble("token_not_renewed")
        try:
            self._header = self._read()
        except (OSError, ValueError) as error:
            if fallback is None:
                raise NoCredentials(f"{where}: tokenFile: {path}: {describe(error)}") from None

    def header(self) -> str | None:
        """The header; the file is read again after `TOKEN_READ_EVERY`."""
        if self._read_at is None or read_elapsed() - self._read_at >= TOKEN_READ_EVERY:
            try:
                self._header = self._read()
            except (OSError, ValueError) as error:
                self._trouble.record(f"{self._path}: {describe(error)}")
            else:
                self._trouble.end()
        return self._header

    def _read(self) -> str:
        header = f"Bearer {trim_token(read_file(self._path).decode('utf-8'))}"
        self._read_at = read_elapsed()
        return header


@dataclass(frozen=True, repr=False)
class Access:
    """The result of a login: how to reach the API server, and as which user."""

    account: Account
    tls: ssl.SSLContext | None = None
    proxy: str | None = None
    token_file: TokenFile | None = None
    expires_at: Instant = math.inf

    def authorize(self) -> dict[str, str]:
        """The header that authenticates a request, or none."""
        value = self.account.authorization
        if self.token_file is not None:
            value = self.token_file.header()
        return {} if value is None else {"Authorization": value}


async def log_in(login: Login) -> Access:
    """Log in. Raises `NoCredentials`, or `TimeoutError` with a message.

    If this is cancelled, the process of a login plugin ends too.
    """
    if login.url is not None:
        return Access(Account(urlsplit(login.url)))
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT):
            account, proxy = await asyncio.to_thread(_load_account, login)
    except TimeoutError:
        where = login.kubeconfig or "the default kubeconfig"
        raise TimeoutError(f"the login by {where} took more than {LOGIN_TIMEOUT:g} s") from None
    expires_at = math.inf
    if account.plugin is not None:
        credential = await PluginRun(account.plugin, os.environ).run()
        expires_at = credential.expires_at
        account = replace(
            account,
            authorization=write_bearer(credential.token) if credential.token else None,
            certificate=credential.certificate,
            key=credential.key,
            user_at=f"{account.plugin.where}: exec: what the plugin answered",
        )
    return await asyncio.to_thread(_prepare, account, proxy, expires_at)


def _prepare(account: Account, proxy: str | None, expires_at: Instant) -> Access:
    file = account.token_file
    return Access(
        account,
        tls=make_context(account) if account.server.scheme == "https" else None,
        proxy=proxy,
        token_file=None
        if file is None
        else TokenFile(file, account.authorization, account.user_at),
        expires_at=expires_at,
    )


def find_namespace(login: Login) -> str:
    """The exporter's own namespace: that of its pod, or else of the kubeconfig's context.

    Needs a successful `log_in`.
    """
    if login.url is not None:
        return "default"
    if login.kubeconfig is None:
        mounted = SERVICE_ACCOUNT / "namespace"
        if mounted.is_file():
            return mounted.read_text(encoding="ascii").strip()
    return choose_account(_read_kubeconfigs(login), read_file).namespace


def _load_account(login: Login) -> tuple[Account, str | None]:
    """The account, and the proxy to its server. Raises `NoCredentials`."""
    account: Account | None = None
    lacking = ""
    if login.kubeconfig is None:
        try:
            account = _load_service_account()
        except (OSError, ValueError) as error:
            lacking = f"no service account of a pod ({why_of(error)}), and "
    try:
        if account is None:
            account = choose_account(_read_kubeconfigs(login), read_file)
        return account, account.proxy or find_proxy(account.server, os.environ)
    except (NoCredentials, ValueError) as error:
        raise NoCredentials(f"{lacking}{error}") from None


def _read_kubeconfigs(login: Login) -> Merged:
    if login.kubeconfig is not None:
        return read_kubeconfigs([login.kubeconfig], read_file, all_exist=True)
    return read_kubeconfigs(find_files(os.environ), read_file)


def _load_service_account() -> Account:
    """The pod's service account. Raises `OSError` or `ValueError`."""
    names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    host, port = (os.environ.get(name, "") for name in names)
    if not host or not port:
        raise ValueError(f"{' or '.join(names)} is not set")
    token = SERVICE_ACCOUNT / "token"
    trim_token(read_file(token).decode("utf-8"))
    netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Account(
        SplitResult("https", netloc, "", "", ""),
        authority=_read_authority(SERVICE_ACCOUNT / "ca.crt"),
        token_file=token,
    )


def _read_authority(path: Path) -> bytes | None:
    """The cluster's CA; without one, the system's CAs are trusted, as by client-go."""
    try:
        authority = read_file(path)
    except OSError as error:
        log.warning("no_cluster_ca", why=f"{path}: {why_of(error)}")
        return None
    if not trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), authority):
        log.warning("no_cluster_ca", why=f"{path}: expected certificates in PEM")
        return None
    return authority


def read_file(path: Path) -> bytes:
    """The content of a regular file: a read of a FIFO may never end. Raises `OSError`."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    return path.read_bytes()


def why_of(error: BaseException) -> str:
    """The type of an error, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
