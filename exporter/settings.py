"""What an operator can set: every key with its default, read from YAML and checked as a whole.

All errors are found before any is reported, each with its path. Durations are Go's (`1h30m`).
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from exporter.engine.model import Policy, Seconds, StuckPolicy


T = TypeVar("T")

LONGEST_WAIT: Seconds = 60.0
"""The longest long poll (design 5)."""

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
_DAYS = re.compile(r"(\d{1,6})d", re.ASCII)
_GO_LONGEST: Seconds = (2**63 - 1) / 1e9
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_CONFIG_MAP = re.compile(r"[a-z0-9]([-.a-z0-9]{0,60}[a-z0-9])?", re.ASCII)
"""As long as a label's value: the checkpoint's name is one too."""
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises: of a scalar that is no such date or number it lets Python's own through."""
_MERGE = "tag:yaml.org,2002:merge"
_LEVELS = ("debug", "info", "warning", "error")
_RETRIES_AT_ONCE = re.compile(r"\bkured\b|machine-api")
"""Users whose drain helper has no pause: kured, and OpenShift's machine-api."""
_HOLDS_PEOPLE = ("system:authenticated", "system:masters", "system:cluster-admins")


class InvalidSettings(Exception):
    """Everything that is wrong with a configuration, one line per fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class Address:
    """Where to listen: a TCP host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of the same machine (or pod) can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True)
class ConfigMaps:
    """The checkpoint's ConfigMaps, whose names begin with `name`, and the Lease of that name."""

    namespace: str
    name: str


@dataclass(frozen=True)
class Listen:
    """The listeners: `query` serves everything, `metrics` only what may be seen by all.

    `page`: single VMs are among it, on the page of `metrics`. `admission` answers admission
    reviews and nothing else; empty: there is no such listener.
    """

    query: tuple[Address, ...] = (Address("127.0.0.1", 9810),)
    metrics: tuple[Address, ...] = (Address("0.0.0.0", 9811),)
    page: bool = False
    admission: tuple[Address, ...] = ()


@dataclass(frozen=True)
class KubeSettings:
    """How the API server is watched, and how often and by whom the checkpoint is written."""

    sync_timeout: Seconds = 30.0
    wait_for_kubevirt: bool = False
    stale_after: Seconds = 180.0
    dead_after: Seconds = 600.0
    read_timeout: Seconds = 120.0
    watch_timeout: Seconds = 600.0
    page_size: int = 500
    refused_retry: Seconds = 300.0
    checkpoint_interval: Seconds = 15.0
    lease_duration: Seconds = 15.0


@dataclass(frozen=True)
class Limits:
    """How much callers may take of each listener, and how many VMIs have series of their own."""

    body_bytes: int = 4 * 2**20
    candidates: int = 5000
    vmi_series: int = 20_000
    connections: int = 500
    request_timeout: Seconds = 30.0
    idle_timeout: Seconds = 120.0


@dataclass(frozen=True)
class Tls:
    """One listener's files; without a certificate it speaks plain HTTP.

    With `client_ca_file` only who has a certificate of that authority is let in.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None


class Authentication(StrEnum):
    """Who says who a caller is, and what they may ask: nobody, or the cluster's API server."""

    NONE = "none"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True)
class AuthSettings:
    """Who may ask, on each listener.

    `allow_insecure_query`: the query API may be served to the network as it is. `cache` is for
    how long an answer of the API server about a token holds. A unix socket gets `socket_mode`
    and, where it is set, `socket_group`.
    """

    query: Authentication = Authentication.NONE
    metrics: Authentication = Authentication.NONE
    allow_insecure_query: bool = False
    cache: Seconds = 30.0
    socket_mode: int = 0o660
    socket_group: str | None = None


class AdmissionMode(StrEnum):
    """What the admission webhook does with an eviction that a rule holds."""

    WARN = "warn"
    ENFORCE = "enforce"


@dataclass(frozen=True)
class AdmissionSettings:
    """Whose evictions the admission webhook judges: by exact user name, or by group."""

    mode: AdmissionMode = AdmissionMode.WARN
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogSettings:
    """How it logs; no format: for people on a terminal, JSON elsewhere."""

    format: str | None = None
    level: str = "info"


@dataclass(frozen=True)
class Settings:
    """The whole configuration. `remarks` are what an operator should know of it.

    `checkpoint` is the path of a file, ConfigMaps, or None.
    """

    policy: Policy = field(default_factory=Policy)
    stuck: StuckPolicy = field(default_factory=StuckPolicy)
    listen: Listen = field(default_factory=Listen)
    checkpoint: Path | ConfigMaps | None = None
    namespaces: tuple[str, ...] = ()
    kube: KubeSettings = field(default_factory=KubeSettings)
    limits: Limits = field(default_factory=Limits)
    tls_query: Tls = field(default_factory=Tls)
    tls_metrics: Tls = field(default_factory=Tls)
    tls_admission: Tls = field(default_factory=Tls)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    log: LogSettings = field(default_factory=LogSettings)
    remarks: tuple[str, ...] = ()


def load_settings(path: Path | None) -> Settings:
    """The settings of a YAML file, or (None) the defaults. Raises `InvalidSettings`."""
    if path is None:
        return Settings()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings([f"{path}: cannot be read: {error}"]) from error
    try:
        document = yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 (a SafeLoader)
    except _NOT_YAML as error:
        raise InvalidSettings([f"{path}: not YAML: {error}"]) from error
    return read_settings({} if document is None else document)


def read_settings(document: object) -> Settings:
    """The settings of a decoded document. Raises `InvalidSettings` with every fault."""
    faults: list[str] = []
    root = _Section("", document, faults)
    remarks: list[str] = []
    kube = root.section("kube")
    auth = root.section("auth")
    tls = root.section("tls")
    settings = Settings(
        policy=_read_policy(root.section("policy"), remarks),
        stuck=_read_stuck(root.section("stuck"), kube),
        listen=_read_listen(root.section("listen")),
        checkpoint=root.take("checkpoint", _checkpoint, Settings.checkpoint),
        namespaces=root.take("namespaces", _namespaces, Settings.namespaces),
        kube=_read_kube(kube),
        limits=_read_limits(root.section("limits")),
        tls_query=_read_tls(tls.section("query")),
        tls_metrics=_read_tls(tls.section("metrics")),
        tls_admission=_read_tls(tls.section("admission")),
        admission=_read_admission(root.section("admission")),
        auth=_read_auth(auth),
        log=_read_log(root.section("log")),
    )
    tls.close()
    root.close()
    _check_exposure(root, settings)
    _check_admission(root, settings, remarks)
    if faults:
        raise InvalidSettings(faults)
    return replace(settings, remarks=tuple(remarks))


def parse_duration(value: object) -> Seconds:
    """A Go duration in seconds. Raises ValueError with what was expected."""
    if type(value) is int and value == 0:
        return 0.0
    expected = f"expected a duration such as 15m or 1h30m, got {value!r}{_hint(value)}"
    if not isinstance(value, str):
        raise ValueError(expected)
    text = value[1:] if value.startswith(("+", "-")) else value
    if text == "0":
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(expected)
    seconds = round(sum(float(number) * _UNITS[unit] for number, unit in parts), 9)
    if value.startswith("-") and seconds:
        raise ValueError(f"must not be negative, got {value!r}")
    if seconds > _GO_LONGEST:
        raise ValueError(f"longer than any Go duration (292 years), got {value!r}")
    return seconds


def _hint(value: object) -> str:
    """What is likely to be wrong with what is no duration: no unit, or one that Go has not."""
    if isinstance(value, int | float | str) and _NUMBER.fullmatch(str(value)):
        return f": it needs a unit, as in {value}m"
    days = _DAYS.match(value) if isinstance(value, str) else None
    return f": there are no days, {days[0]} is {int(days[1]) * 24}h" if days else ""


def format_duration(seconds: Seconds) -> str:
    """Seconds as a Go duration, for people."""
    if not seconds:
        return "0"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{hours:.0f}h" if hours else "", f"{minutes:g}m" if minutes else ""]
    return "".join(parts) + (f"{rest:g}s" if rest else "")


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that stands twice is a fault, not a choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


class _Section:
    """One mapping of the document: hands out its values and reports what nobody took."""

    def __init__(self, path: str, value: object, faults: list[str]) -> None:
        self._path = path
        self._faults = faults
        self._values: Mapping[Any, Any] = {}
        self._left: set[Any] = set()
        self._known: dict[str, str] = {}
        self._wrong: set[str] = set()
        if isinstance(value, Mapping):
            self._values = value
            self._left = set(value)
        elif value is not None:
            self.report("", f"expected a mapping, got {value!r}")

    def section(self, key: str) -> "_Section":
        """The mapping below a key; an absent one is empty."""
        self._ask_for(key)
        return _Section(self._at(key), self._values.get(key), self._faults)

    def has(self, key: str) -> bool:
        """Whether the operator wrote this key."""
        return self._values.get(key) is not None

    def is_wrong(self, key: str) -> bool:
        """Whether what the operator wrote there has been reported."""
        return key in self._wrong

    def take(self, key: str, parse: Callable[[object], T], default: T) -> T:
        """A value, parsed; the default where it is absent, null or wrong."""
        self._ask_for(key)
        if not self.has(key):
            return default
        try:
            return parse(self._values[key])
        except ValueError as error:
            self.report(key, str(error))
            self._wrong.add(key)
            return default

    def report(self, key: str, fault: str) -> None:
        """A fault of the value at a key."""
        self._faults.append(f"{self._at(key) or 'the configuration'}: {fault}")

    def close(self) -> None:
        """Report the keys that nobody asked for, each with the nearest that somebody did."""
        for key in sorted(map(str, self._left)):
            near = get_close_matches(key.lower(), self._known, n=1)
            hint = f": did you mean {self._known[near[0]]}?" if near else ""
            self.report(key, f"unknown key{hint}")

    def _ask_for(self, key: str) -> None:
        self._left.discard(key)
        self._known[key.lower()] = key

    def _at(self, key: str) -> str:
        return ".".join(part for part in (self._path, key) if part)


def _read_policy(section: _Section, remarks: list[str]) -> Policy:
    default = Policy()
    guards = section.section("guards")
    policy = Policy(
        migration_cooldown=section.take(
            "migrationCooldown", parse_duration, default.migration_cooldown
        ),
        max_migration_cooldown=section.take(
            "maxMigrationCooldown", parse_duration, default.max_migration_cooldown
        ),
        migration_history_window=section.take(
            "migrationHistoryWindow", parse_duration, default.migration_history_window
        ),
        count_failed_migrations=section.take(
            "countFailedMigrations", _boolean, default.count_failed_migrations
        ),
        guard_pending_migrations=guards.take(
            "pendingMigrations", _boolean, default.guard_pending_migrations
        ),
        guard_evacuations=guards.take("evacuations", _boolean, default.guard_evacuations),
    )
    guards.close()
    section.close()
    _check_cap(section, policy)
    _remark_policy(section, policy, remarks)
    return policy


def _check_cap(section: _Section, policy: Policy) -> None:
    floor, cap = policy.migration_cooldown, policy.max_migration_cooldown
    if not floor or not cap or cap >= floor:
        return
    if section.is_wrong("migrationCooldown") or section.is_wrong("maxMigrationCooldown"):
        return

    def told(key: str, value: Seconds) -> str:
        return f"{key} {format_duration(value)}{'' if section.has(key) else ' (the default)'}"

    section.report(
        "maxMigrationCooldown",
        f"{told('maxMigrationCooldown', cap)} is below {told('migrationCooldown', floor)}",
    )


def _remark_policy(section: _Section, policy: Policy, remarks: list[str]) -> None:
    for key, value, meaning in (
        ("migrationCooldown", policy.migration_cooldown, "no floor"),
        ("maxMigrationCooldown", policy.max_migration_cooldown, "no cap"),
        ("migrationHistoryWindow", policy.migration_history_window, "no backoff"),
    ):
        if section.has(key) and not value:
            remarks.append(
                f"policy.{key}: 0 means {meaning} here; the KubevirtMigrationAware plugin"
                " reads 0 as its default"
            )
    window, cap = policy.migration_history_window, policy.max_migration_cooldown
    if section.has("migrationHistoryWindow") and window and cap and window <= 6 * cap:
        remarks.append(
            f"policy.migrationHistoryWindow: {format_duration(window)} is not longer than six"
            f" times maxMigrationCooldown ({format_duration(6 * cap)}): the backoff decays"
            " before the cap can hold"
        )


def _read_stuck(section: _Section, kube: _Section) -> StuckPolicy:
    default = StuckPolicy()
    stuck = StuckPolicy(
        after=section.take("after", parse_duration, default.after),
        failed_attempts=section.take("failedAttempts", _count, default.failed_attempts),
        migration_timeout=section.take(
            "migrationTimeout", parse_duration, default.migration_timeout
        ),
        external=section.take("external", parse_duration, default.external),
        retry_backoff=kube.take("retryBackoff", _positive_duration, default.retry_backoff),
    )
    section.close()
    return stuck


def _read_listen(section: _Section) -> Listen:
    default = Listen()
    listen = Listen(
        query=section.take("query", _addresses, default.query),
        metrics=section.take("metrics", _addresses, default.metrics),
        page=section.take("page", _boolean, default.page),
        admission=section.take("admission", _addresses, default.admission),
    )
    section.close()
    listeners = listen.query + listen.metrics + listen.admission
    addresses = [address for address in listeners if address.port or address.path]
    for twice in sorted({str(a) for a in addresses if addresses.count(a) > 1}):
        section.report("", f"{twice} is listed twice")
    return listen


def _check_exposure(root: _Section, settings: Settings) -> None:
    """What can be reached from the network is encrypted, and asks who its callers are."""
    auth, tls = settings.auth, settings.tls_query
    is_safe = tls.cert_file and (tls.client_ca_file or auth.query is Authentication.KUBERNETES)
    for address in settings.listen.query:
        if not (address.is_local or is_safe or auth.allow_insecure_query):
            root.report(
                "listen.query",
                f"{address} can be reached from the network: it needs tls.query with a certificate"
                " and either its clientCAFile or auth.query: kubernetes. Else listen on a loopback"
                " address or a unix socket, or say auth.allowInsecureQuery: true",
            )
    for listener, addresses, asks, files in (
        ("query", settings.listen.query, auth.query, settings.tls_query),
        ("metrics", settings.listen.metrics, auth.metrics, settings.tls_metrics),
    ):
        is_exposed = not all(address.is_local for address in addresses)
        if asks is Authentication.KUBERNETES and is_exposed and not files.cert_file:
            root.report(
                f"auth.{listener}",
                "kubernetes has callers send their tokens, which would cross the network in plain"
                f" text: it needs tls.{listener} with a certificate",
            )


def _check_admission(root: _Section, settings: Settings, remarks: list[str]) -> None:
    """What an admission webhook needs, and what is known of those whose evictions it judges."""
    admission, addresses = settings.admission, settings.listen.admission
    listed = admission.users + admission.groups
    if any(address.path for address in addresses):
        root.report("listen.admission", "the API server calls no unix socket: expected host:port")
    elif addresses and not settings.tls_admission.cert_file:
        root.report(
            "listen.admission",
            "the API server calls a webhook over TLS only: it needs tls.admission with a"
            " certificate",
        )
    if admission.mode is AdmissionMode.ENFORCE and not listed:
        root.report(
            "admission.users",
            "enforce without users or groups would hold nobody: list those whose evictions are"
            " to be denied",
        )
    elif addresses and not listed:
        remarks.append("admission.users: no user and no group is listed, so nobody is held")
    if listed and not addresses:
        remarks.append("admission: listen.admission is not set, so no eviction is judged")
    remarks += [
        f"admission.users: {user} is known to repeat a denied eviction without a pause: better"
        " not listed"
        for user in admission.users
        if _RETRIES_AT_ONCE.search(user)
    ]
    remarks += [
        f"admission.groups: {group} holds people too: a `kubectl drain` of theirs would wait"
        for group in admission.groups
        if group in _HOLDS_PEOPLE
    ]


def _read_admission(section: _Section) -> AdmissionSettings:
    default = AdmissionSettings()
    admission = AdmissionSettings(
        mode=section.take("mode", _admission_mode, default.mode),
        users=section.take("users", _names, default.users),
        groups=section.take("groups", _names, default.groups),
    )
    section.close()
    return admission


def _read_kube(section: _Section) -> KubeSettings:
    default = KubeSettings()
    kube = KubeSettings(
        sync_timeout=section.take("syncTimeout", _positive_duration, default.sync_timeout),
        wait_for_kubevirt=section.take("waitForKubeVirt", _boolean, default.wait_for_kubevirt),
        stale_after=section.take("staleAfter", _positive_duration, default.stale_after),
        dead_after=section.take("deadAfter", _positive_duration, default.dead_after),
        read_timeout=section.take("readTimeout", _positive_duration, default.read_timeout),
        watch_timeout=section.take("watchTimeout", _positive_duration, default.watch_timeout),
        page_size=section.take("pageSize", _count, default.page_size),
        refused_retry=section.take("refusedRetry", _positive_duration, default.refused_retry),
        checkpoint_interval=section.take(
            "checkpointInterval", _positive_duration, default.checkpoint_interval
        ),
        lease_duration=section.take("leaseDuration", _lease_duration, default.lease_duration),
    )
    section.close()
    return kube


def _read_limits(section: _Section) -> Limits:
    default = Limits()
    limits = Limits(
        body_bytes=section.take("bodyBytes", _count, default.body_bytes),
        candidates=section.take("candidates", _count, default.candidates),
        vmi_series=section.take("vmiSeries", _count, default.vmi_series),
        connections=section.take("connections", _count, default.connections),
        request_timeout=section.take("requestTimeout", _positive_duration, default.request_timeout),
        idle_timeout=section.take("idleTimeout", _positive_duration, default.idle_timeout),
    )
    section.close()
    return limits


def _read_tls(section: _Section) -> Tls:
    tls = Tls(
        cert_file=section.take("certFile", _path, None),
        key_file=section.take("keyFile", _path, None),
        client_ca_file=section.take("clientCAFile", _path, None),
    )
    section.close()
    if (tls.cert_file is None) != (tls.key_file is None):
        section.report("", "certFile and keyFile go together")
    if tls.client_ca_file is not None and tls.cert_file is None:
        section.report("clientCAFile", "needs a certFile and a keyFile")
    return tls


def _read_auth(section: _Section) -> AuthSettings:
    default = AuthSettings()
    auth = AuthSettings(
        query=section.take("query", _authentication, default.query),
        metrics=section.take("metrics", _authentication, default.metrics),
        allow_insecure_query=section.take(
            "allowInsecureQuery", _boolean, default.allow_insecure_query
        ),
        cache=section.take("cache", parse_duration, default.cache),
        socket_mode=section.take("socketMode", _mode, default.socket_mode),
        socket_group=section.take("socketGroup", _group, default.socket_group),
    )
    section.close()
    return auth


def _read_log(section: _Section) -> LogSettings:
    default = LogSettings()
    log = LogSettings(
        format=section.take("format", _one_of("json", "console"), default.format),
        level=section.take("level", _one_of(*_LEVELS), default.level),
    )
    section.close()
    return log


def parse_address(value: object) -> Address:
    """`host:port`, `[v6]:port` or `unix:/path`. Raises ValueError."""
    expected = "expected host:port or unix:/path"
    if not isinstance(value, str):
        raise ValueError(f"{expected}, got {value!r}")
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"{expected} with an absolute path, got {value!r}")
        return Address(path=path)
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{expected}, got {value!r}")
    if host.startswith("[") and host.endswith("]"):
        return Address(host[1:-1], int(port))
    if ":" in host:
        raise ValueError(f"an IPv6 address stands in brackets, as in [::1]:9810, got {value!r}")
    return Address(host or "0.0.0.0", int(port))


def _addresses(value: object) -> tuple[Address, ...]:
    if not isinstance(value, list):
        return (parse_address(value),)
    if not value:
        raise ValueError("expected at least one address")
    return _each(value, parse_address)


def _checkpoint(value: object) -> Path | ConfigMaps | None:
    expected = f"expected none, file:/path or configmap:namespace/name, got {value!r}"
    if value == "none":
        return None
    if not isinstance(value, str):
        raise ValueError(expected)
    kind, _, place = value.partition(":")
    namespace, slash, name = place.partition("/")
    if kind == "file" and place.startswith("/") and not place.endswith("/"):
        return Path(place)
    if kind == "configmap" and slash and _NAMESPACE.fullmatch(namespace):
        if _CONFIG_MAP.fullmatch(name):
            return ConfigMaps(namespace, name)
        raise ValueError(f"expected the name of a ConfigMap after the /, got {value!r}")
    raise ValueError(expected)


def _namespaces(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of namespaces, got {value!r}")
    return tuple(dict.fromkeys(_each(value, _namespace)))


def _namespace(value: object) -> str:
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        raise ValueError(f"expected the name of a namespace, got {value!r}")
    return value


def _each(values: list[object], parse: Callable[[object], T]) -> tuple[T, ...]:
    """Every value parsed, or one ValueError that tells of all that are wrong."""
    parsed, wrong = [], []
    for value in values:
        try:
            parsed.append(parse(value))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(parsed)


def _positive_duration(value: object) -> Seconds:
    seconds = parse_duration(value)
    if not seconds:
        raise ValueError(f"must be longer than 0, got {value!r}")
    return seconds


def _lease_duration(value: object) -> Seconds:
    seconds = parse_duration(value)
    if seconds < 1:
        raise ValueError(f"must be at least 1s, got {value!r}")
    return seconds


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected a whole number of at least 1, got {value!r}")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of names, got {value!r}")
    return tuple(dict.fromkeys(_each(value, _user)))


def _user(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected the name of a user or group, got {value!r}")
    return value


def _admission_mode(value: object) -> AdmissionMode:
    return AdmissionMode(_one_of(*AdmissionMode)(value))


def _authentication(value: object) -> Authentication:
    return Authentication(_one_of(*Authentication)(value))


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected the path of a file, got {value!r}")
    return Path(value)


def _mode(value: object) -> int:
    expected = f'expected a file mode such as "0660", in quotes, got {value!r}'
    if not isinstance(value, str) or not re.fullmatch("0?[0-7]{3}", value, re.ASCII):
        raise ValueError(expected)
    return int(value, 8)


def _group(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"expected the name or number of a group, got {value!r}")
    return str(value)


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}")
        return value

    return parse
