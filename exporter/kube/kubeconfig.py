"""Reads and merges kubeconfigs by the rules of client-go (`tools/clientcmd/loader.go`)."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from exporter.errors import CommandFailed, Exit
from exporter.kube.go_yaml import read_go_yaml


class NoCredentials(CommandFailed):
    """There are no usable credentials. The message says what was tried, and has no secret."""

    exit_code = Exit.NO_CREDENTIALS


class Data(bytes):
    """Bytes that are written as base64."""


class Extension(Struct):
    """A named value that client-go does not interpret."""

    name: str = ""
    extension: Any = None


class Cluster(Struct, rename="kebab"):
    """How to reach a cluster."""

    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: Data = Data()
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: list[Extension] = []


class Variable(Struct):
    """A variable of a login plugin's environment."""

    name: str = ""
    value: str = ""


class Exec(Struct, rename="camel"):
    """A login plugin."""

    api_version: str = ""
    command: str = ""
    args: list[str | None] = []
    env: list[Variable] = []
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = ""


class AuthProvider(Struct):
    """A login that older clients have built in."""

    name: str = ""
    config: dict[str, str] = {}


class User(Struct, rename="kebab"):
    """Who a user is."""

    client_certificate: str = ""
    client_certificate_data: Data = Data()
    client_key: str = ""
    client_key_data: Data = Data()
    token: str = ""
    token_file: str = field(name="tokenFile", default="")
    impersonate: str = field(name="as", default="")
    as_uid: str = ""
    as_groups: list[str | None] = []
    as_user_extra: dict[str, list[str | None]] = {}
    username: str = ""
    password: str = ""
    auth_provider: AuthProvider | None = None
    exec: Exec | None = None


class Context(Struct):
    """The names of a cluster and of a user."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(Struct):
    name: str = ""
    cluster: Cluster = field(default_factory=Cluster)


class _NamedUser(Struct):
    name: str = ""
    user: User = field(default_factory=User)


class _NamedContext(Struct):
    name: str = ""
    context: Context = field(default_factory=Context)


class _Document(Struct, rename="kebab"):
    api_version: str = field(name="apiVersion", default="")
    kind: str = ""
    current_context: str = ""
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []


T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A cluster, user or context, and the file in which it stands."""

    kind: str
    name: str
    value: T
    path: Path

    @property
    def place(self) -> str:
        """The file and the entry, for a message."""
        return f"{self.path}: {self.kind} {self.name!r}"

    def refuse(self, key: str, expected: str) -> NoCredentials:
        """The error for one of its keys."""
        return NoCredentials(f"{self.place}: {key}: {expected}")

    def resolve(self, path: str) -> Path:
        """A path in this entry, which is relative to the entry's file."""
        return self.path.absolute().parent / path


@dataclass(frozen=True)
class Merged:
    """What several kubeconfigs say together: the first that has a name decides about it."""

    paths: Sequence[Path]
    current_context: str
    clusters: Mapping[str, Entry[Cluster]]
    users: Mapping[str, Entry[User]]
    contexts: Mapping[str, Entry[Context]]

    @property
    def where(self) -> str:
        """The files, for a message."""
        return ", ".join(str(path) for path in self.paths) or "no kubeconfig"


ReadFile = Callable[[Path], bytes]
"""Reads a file. Raises OSError."""


def find_files(environment: Mapping[str, str]) -> list[Path]:
    """The kubeconfigs that kubectl would read: those in KUBECONFIG, or else ~/.kube/config."""
    listed = environment.get("KUBECONFIG", "")
    if listed:
        return [Path(name) for name in dict.fromkeys(listed.split(":")) if name]
    home = environment.get("HOME", "")
    return [Path(home, ".kube", "config")] if home else []


def read_kubeconfigs(paths: Sequence[Path], read: ReadFile, *, all_exist: bool = False) -> Merged:
    """Read and merge kubeconfigs. A file that does not exist is skipped, unless `all_exist`."""
    documents: dict[Path, _Document] = {}
    for path in paths:
        try:
            documents[path] = _decode(path, read(path))
        except FileNotFoundError:
            if all_exist:
                raise NoCredentials(f"{path}: there is no such kubeconfig file") from None
        except OSError as error:
            raise NoCredentials(f"{path}: cannot be read: {error.strerror or error}") from None
    clusters: dict[str, Entry[Cluster]] = {}
    users: dict[str, Entry[User]] = {}
    contexts: dict[str, Entry[Context]] = {}
    for path, document in documents.items():
        _add("cluster", path, [(row.name, row.cluster) for row in document.clusters], clusters)
        _add("user", path, [(row.name, row.user) for row in document.users], users)
        _add("context", path, [(row.name, row.context) for row in document.contexts], contexts)
    chosen = [document.current_context for document in documents.values()]
    first = next((name for name in chosen if name), "")
    return Merged([*documents] or list(paths), first, clusters, users, contexts)


def _decode(path: Path, content: bytes) -> _Document:
    try:
        value = read_go_yaml(content)
        document = msgspec.convert({} if value is None else value, _Document, dec_hook=_decode_data)
    except (ValueError, RecursionError) as error:
        raise NoCredentials(f"{path}: {error}") from None
    if (document.kind or "Config", document.api_version or "v1") != ("Config", "v1"):
        raise NoCredentials(f"{path}: apiVersion, kind: expected v1 and Config")
    return document


def _decode_data(_: type, text: object) -> Data:
    """Decode base64, whose lines may be broken. Raises `ValueError`."""
    if not isinstance(text, str):
        raise ValueError("Expected base64")  # noqa: TRY004 (msgspec adds the key to a ValueError)
    try:
        return Data(base64.b64decode(text.replace("\r", "").replace("\n", ""), validate=True))
    except (binascii.Error, ValueError):
        raise ValueError("Expected base64") from None


def _add(
    kind: str, path: Path, named: Sequence[tuple[str, T]], merged: dict[str, Entry[T]]
) -> None:
    """Add a file's entries whose names are new. A name that the file has twice is an error."""
    own: dict[str, T] = {}
    for name, value in named:
        if name in own:
            raise NoCredentials(f"{path}: {kind}s: two have the name {name!r}: expected one")
        own[name] = value
        merged.setdefault(name, Entry(kind, name, value, path))
