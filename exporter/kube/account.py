"""Which cluster and which user a kubeconfig means, by the rules of client-go.

Merged kubeconfigs in, an `Account` out, or `NoCredentials` with a sentence that names the file, the
key and what was expected (`tools/clientcmd/client_config.go`, `validation.go`).
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote

from msgspec import structs

from exporter.kube.kubeconfig import (
    AuthProvider,
    Cluster,
    Context,
    Data,
    Entry,
    Exec,
    Merged,
    NoCredentials,
    ReadFile,
    User,
)
from exporter.kube.proxies import check_proxy, split_url


EXEC_VERSIONS = tuple(f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1"))
_EXEC_VERSION_EXPECTED = f"expected {' or '.join(EXEC_VERSIONS)}"
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_INTERACTIVE_MODES = ("Never", "IfAvailable", "Always")
_HEADER_NAME = "!#$&'*+-.^_`|~"
"""What the name of a header may contain besides letters and digits."""


@dataclass(frozen=True)
class Plugin:
    """A login plugin of a kubeconfig, with the path of its command and its interactive mode."""

    where: str
    exec: Exec
    cluster: Mapping[str, object] | None
    """What `provideClusterInfo` tells the plugin."""


@dataclass(frozen=True, repr=False)
class Account:
    """Which cluster, how to trust it, and which user. The representation has no secrets."""

    server: SplitResult
    """The URL without user, query and fragment."""
    cluster_at: str = ""
    user_at: str = ""
    """Where the cluster and the user stand, for a message."""
    namespace: str = "default"
    proxy: str | None = None
    """The kubeconfig's own proxy; without one, the environment decides."""
    authority: bytes | None = None
    """CA certificates in PEM; None: the system's."""
    verifies: bool = True
    server_name: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    authorization: str | None = None
    """The header for a user with a token, or with a name and a password."""
    token_file: Path | None = None
    """Decides before `authorization`."""
    plugin: Plugin | None = None
    impersonation: Sequence[tuple[str, str]] = ()
    """Headers; the same name may occur several times."""


def choose_account(merged: Merged, read: ReadFile) -> Account:
    """The account of the current context, with the files that it names. Raises `NoCredentials`."""
    context, cluster, user = _choose_entries(merged)
    server, server_login = _parse_server(cluster)
    authority = _read_pair(
        cluster, "certificate-authority", cluster.value.certificate_authority_data, read
    )
    proxy = _check_proxy_url(cluster)
    _check_user(user)
    certificate, key = _read_certificate(user, read)
    account = Account(
        server=server,
        cluster_at=cluster.place,
        user_at=user.place,
        namespace=context.value.namespace or "default",
        proxy=proxy,
        authorization=server_login,
        impersonation=_impersonate(user),
    )
    if server.scheme != "https":
        return account  # client-go sends no credentials over plain HTTP
    if authority is not None and cluster.value.insecure_skip_tls_verify:
        raise cluster.refuse("insecure-skip-tls-verify", "expected no certificate authority then")
    authorization, token_file = _authorize(user)
    plugin = _find_plugin(user, cluster, authority, proxy)
    if server_login or authorization or token_file or certificate:
        plugin = None  # client-go calls no plugin if there are other credentials
    return replace(
        account,
        authority=authority,
        verifies=not cluster.value.insecure_skip_tls_verify,
        server_name=cluster.value.tls_server_name or None,
        certificate=certificate,
        key=key,
        authorization=server_login or authorization,
        token_file=None if server_login else token_file,
        plugin=plugin,
    )


def _choose_entries(
    merged: Merged,
) -> tuple[Entry[Context], Entry[Cluster], Entry[User]]:
    """The current context, its cluster and its user, who is anonymous if there is none."""
    name = merged.current_context
    nowhere = Path(merged.where)
    context = merged.contexts.get(name)
    if context is None:
        if name:
            raise NoCredentials(
                f"{merged.where}: current-context: there is no context {name!r} in contexts"
            )
        context = Entry("context", "", Context(), nowhere)
    cluster = merged.clusters.get(context.value.cluster)
    if cluster is None:
        if not name:
            raise NoCredentials(f"{merged.where}: current-context: expected the name of a context")
        raise context.refuse("cluster", f"expected one of clusters, got {context.value.cluster!r}")
    user = merged.users.get(context.value.user)
    return context, cluster, user or Entry("user", "", User(), nowhere)


def _parse_server(cluster: Entry[Cluster]) -> tuple[SplitResult, str | None]:
    """The server's URL, and the header for the user that it may contain.

    Without a scheme it is a host with plain HTTP.
    """
    text = cluster.value.server
    parts = split_url(text)
    if text and (parts is None or not parts.scheme or not parts.netloc):
        parts = split_url(f"http://{text}")
        if parts is not None and parts.path not in ("", "/"):
            parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise cluster.refuse("server", "expected a URL such as https://host:6443")
    login = None
    if parts.username is not None:
        login = _basic(unquote(parts.username), unquote(parts.password or ""))
    netloc = parts.netloc.rpartition("@")[2]
    return SplitResult(parts.scheme, netloc, parts.path.rstrip("/"), "", ""), login


def _check_proxy_url(cluster: Entry[Cluster]) -> str | None:
    text = cluster.value.proxy_url
    if not text:
        return None
    try:
        return check_proxy(split_url(text))
    except ValueError as error:
        raise cluster.refuse("proxy-url", str(error)) from None


def _read_pair(entry: Entry[Any], key: str, data: Data, read: ReadFile) -> bytes | None:
    """The content of `key`, which is a path, or of `key-data`; None if both are empty."""
    path: str = getattr(entry.value, key.replace("-", "_"))
    if not path:
        return data or None
    if data:
        raise entry.refuse(f"{key}, {key}-data", "expected one of them")
    file = entry.resolve(path)
    try:
        return read(file)
    except OSError as error:
        raise entry.refuse(key, f"{file} cannot be read: {error.strerror or error}") from None


def _read_certificate(user: Entry[User], read: ReadFile) -> tuple[bytes | None, bytes | None]:
    """The client certificate and its key, which means nothing without a certificate."""
    value = user.value
    certificate = _read_pair(user, "client-certificate", value.client_certificate_data, read)
    if certificate is None:
        return None, None
    key = _read_pair(user, "client-key", value.client_key_data, read)
    if key is None:
        raise user.refuse("client-key", "expected the key of the client-certificate")
    return certificate, key


def _check_user(user: Entry[User]) -> None:
    """Raises `NoCredentials` for combinations that client-go refuses, also over plain HTTP."""
    value, plugin = user.value, user.value.exec
    is_asserted = value.as_uid or value.as_groups or value.as_user_extra
    faults: list[tuple[object, str, str]] = [
        (
            value.token and (value.username or value.password),
            "token, username",
            "expected one of them",
        ),
        (
            is_asserted and not value.impersonate,
            "as",
            "expected a user, because as-uid, as-groups or as-user-extra is set",
        ),
    ]
    if plugin is not None:
        modes, is_known = ", ".join(_INTERACTIVE_MODES), _find_mode(plugin) in _INTERACTIVE_MODES
        is_named = all(variable.name for variable in plugin.env)
        faults += [
            (value.auth_provider is not None, "exec, auth-provider", "expected one of them"),
            (not plugin.command, "exec.command", "expected a command"),
            (not plugin.api_version, "exec.apiVersion", _EXEC_VERSION_EXPECTED),
            (not is_named, "exec.env", "expected a name for each variable"),
            (not is_known, "exec.interactiveMode", f"expected {modes}"),
        ]
    for is_wrong, key, expected in faults:
        if is_wrong:
            raise user.refuse(key, expected)


def _find_mode(plugin: Exec) -> str:
    """The interactive mode; older versions have a default."""
    is_old = plugin.api_version.endswith(("/v1beta1", "/v1alpha1"))
    return plugin.interactive_mode or ("IfAvailable" if is_old else "")


def _authorize(user: Entry[User]) -> tuple[str | None, Path | None]:
    """The header for a token or a user with a password, and the token's file."""
    value = user.value
    token_file = user.resolve(value.token_file) if value.token_file else None
    if value.username and token_file is not None:
        raise user.refuse("tokenFile, username", "expected one of them")
    if value.auth_provider is not None:
        _check_provider(user, value.auth_provider)
    if value.token:
        _check_header(user, "token", value.token)
        return write_bearer(value.token), token_file
    if value.username:
        return _basic(value.username, value.password), None
    return None, token_file


def _check_provider(user: Entry[User], provider: AuthProvider) -> None:
    """Raises `NoCredentials` unless a token makes the provider unnecessary."""
    value, needed = user.value, ("idp-issuer-url", "client-id")
    has_others = value.token or value.token_file or value.username
    is_complete = provider.name == "oidc" and all(provider.config.get(key) for key in needed)
    if not (has_others and is_complete):
        raise user.refuse(
            "auth-provider",
            "not supported: expected a login plugin (exec), such as `kubectl oidc-login` for OIDC",
        )


def _find_plugin(
    user: Entry[User], cluster: Entry[Cluster], authority: bytes | None, proxy: str | None
) -> Plugin | None:
    plugin = user.value.exec
    if plugin is None:
        return None
    if plugin.api_version not in EXEC_VERSIONS:
        raise user.refuse("exec.apiVersion", _EXEC_VERSION_EXPECTED)
    is_path = "/" in plugin.command
    return Plugin(
        where=user.place,
        exec=structs.replace(
            plugin,
            command=str(user.resolve(plugin.command)) if is_path else plugin.command,
            interactive_mode=_find_mode(plugin),
        ),
        cluster=(
            _describe_cluster(cluster.value, authority, proxy)
            if plugin.provide_cluster_info
            else None
        ),
    )


def _describe_cluster(
    cluster: Cluster, authority: bytes | None, proxy: str | None
) -> dict[str, object]:
    """The cluster as an ExecCredential has it, without empty fields."""
    extensions = {extension.name: extension.extension for extension in cluster.extensions}
    optional = {
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": base64.b64encode(authority or b"").decode(),
        "proxy-url": proxy,
        "disable-compression": cluster.disable_compression,
    }
    present = {key: value for key, value in optional.items() if value}
    return {"server": cluster.server} | present | {"config": extensions.get(_EXEC_EXTENSION)}


def _impersonate(user: Entry[User]) -> list[tuple[str, str]]:
    """The headers that ask the server to act as another user."""
    value = user.value
    if not value.impersonate:
        return []
    headers = [("Impersonate-User", value.impersonate)]
    if value.as_uid:
        headers.append(("Impersonate-Uid", value.as_uid))
    headers += [("Impersonate-Group", group or "") for group in value.as_groups]
    for key, texts in value.as_user_extra.items():
        name = f"Impersonate-Extra-{quote(key, safe=_HEADER_NAME)}"
        headers += [(name, text or "") for text in texts]
    for _, text in headers:
        _check_header(user, "as", text)
    return headers


def write_bearer(token: str) -> str:
    """The header for a token."""
    return f"Bearer {token}".rstrip(" \t")


def is_header(text: str) -> bool:
    """Whether a header may contain this text: it has no line break or control character."""
    return not any((c < " " and c != "\t") or c == "\x7f" for c in text)


def _check_header(user: Entry[User], key: str, text: str) -> None:
    if not is_header(text):
        raise user.refuse(key, "has a control character or a line break: expected one line")


def _basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"
