"""The settings of the exporter: every key with its default, and the checks across keys.

All faults are collected before any is reported, each with its path. `Section.read` maps the fields
of these classes to keys and their types to parsers.
"""

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from msgspec import structs

from exporter.engine.facts.model import Seconds
from exporter.engine.facts.names import KUBEVIRT, KubeVirtNames
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.engine.facts.trust import DEAD_AFTER
from exporter.settings.document import InvalidSettings, Section, read_yaml
from exporter.settings.policy import read_policy
from exporter.settings.values import (
    Address,
    parse_boolean,
    parse_cipher_suites,
    parse_domain,
    parse_duration,
    parse_file_mode,
    parse_history,
    parse_member,
    parse_names,
    parse_namespaces,
    parse_one_of,
    parse_positive_duration,
    parse_prefix,
    parse_responder,
    parse_runbook_link,
    parse_socket,
    parse_timeout,
    parse_vm_link,
)


T = TypeVar("T")
Timeout: TypeAlias = Annotated[Seconds, parse_timeout]
Names: TypeAlias = Annotated[tuple[str, ...], parse_names]

LONGEST_WAIT: Seconds = 60.0
"""The longest time that a long poll waits."""

KUBERNETES_EVICTOR = "system:serviceaccount:kube-system:imperative-eviction-responder-controller"
"""Kubernetes' own responder to EvictionRequests, which comes last."""
_RETRIES_AT_ONCE = re.compile(r"\bkured\b|machine-api")
"""Users who retry a denied eviction without a pause: kured and OpenShift's machine-api."""
_GROUPS_OF_PEOPLE = ("system:authenticated", "system:masters", "system:cluster-admins")


@dataclass(frozen=True)
class Listen:
    """The listeners: `query` serves everything, `metrics` only metrics, probes and the page.

    `hosts`: further values of the header `Host` that a `query` listener on loopback accepts if it
    has no authentication. `page`: whether the page on `metrics` shows single VMs. `admission`
    serves the admission webhook; it is off if empty. `local` is a unix socket that serves
    everything to every program in the pod, without authentication; it is off if None.
    """

    query: tuple[Address, ...] = (Address("127.0.0.1", 9810),)
    metrics: tuple[Address, ...] = (Address("0.0.0.0", 9811),)
    hosts: Names = ()
    page: bool = False
    admission: tuple[Address, ...] = ()
    local: Annotated[Address | None, parse_socket] = None


@dataclass(frozen=True)
class KubeSettings:
    """How to watch the API server, and how often to write the history file."""

    sync_timeout: Timeout = 30.0
    wait_for_kubevirt: bool = False
    stale_after: Timeout = 180.0
    dead_after: Timeout = DEAD_AFTER
    read_timeout: Timeout = 120.0
    watch_timeout: Timeout = 600.0
    rejected_retry: Timeout = 300.0
    history_interval: Timeout = 15.0


@dataclass(frozen=True)
class Limits:
    """Limits of each listener, and how many VMIs have their own series."""

    body_bytes: int = 4 * 2**20
    candidates: int = 5000
    vmi_series: int = 20_000
    connections: int = 500
    request_timeout: Timeout = 30.0
    idle_timeout: Timeout = 120.0


class MinVersion(StrEnum):
    """The oldest version of TLS that a listener accepts, with the names of Kubernetes."""

    TLS_1_2 = "VersionTLS12"
    TLS_1_3 = "VersionTLS13"


@dataclass(frozen=True)
class TlsVersions:
    """What all listeners accept; without `cipher_suites`, all `TLS_1_2_SUITES`."""

    min_version: MinVersion = MinVersion.TLS_1_2
    cipher_suites: Annotated[tuple[str, ...], parse_cipher_suites] = ()


@dataclass(frozen=True)
class Tls:
    """One listener's TLS files; without a certificate the listener serves plain HTTP.

    With `client_ca_file` callers need a certificate that this CA signed. `versions` is the same for
    every listener.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    versions: TlsVersions = TlsVersions()


class Authentication(StrEnum):
    """Who authenticates and authorizes callers: nobody, or the cluster's API server."""

    NONE = "none"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True)
class AuthSettings:
    """The authentication of each listener.

    `allow_insecure_query`: serve the query API to the network without protection. `cache`: how
    long the API server's answer about a token is reused. Unix sockets get `socket_mode`.
    """

    query: Authentication = Authentication.NONE
    metrics: Authentication = Authentication.NONE
    allow_insecure_query: bool = False
    cache: Seconds = 30.0
    socket_mode: Annotated[int, parse_file_mode] = 0o660


class AdmissionMode(StrEnum):
    """What the admission webhook does with an eviction that a rule blocks."""

    WARN = "warn"
    ENFORCE = "enforce"


@dataclass(frozen=True)
class AdmissionSettings:
    """The users and groups whose evictions the admission webhook judges, by exact name.

    `max_hold`: how long evictions of one VMI may be denied without a pause; 0 means no limit.
    `observe`: remember which user requested each evacuation; it needs a webhook that is called for
    all users.
    """

    mode: AdmissionMode = AdmissionMode.WARN
    users: Names = ()
    groups: Names = ()
    max_hold: Annotated[Seconds, parse_duration] = 86_400.0
    observe: bool = False


class EvictionRequestMode(StrEnum):
    """What is done with the EvictionRequests for launcher pods."""

    OFF = "off"
    OBSERVE = "observe"
    RESPOND = "respond"


@dataclass(frozen=True)
class EvictionRequestSettings:
    """The Evictions of lifecycle.k8s.io.

    Without a `mode` they are observed where the API server serves them and the exporter may read
    them. `deschedulers`: the requesters who count as a descheduler. In the mode `respond` they are
    answered where a pod names the responder `name`; with `evict` the exporter asks for the eviction
    itself after a hold, and otherwise Kubernetes does. `cancel`: cancel KubeVirt's evacuation when
    its requesters have withdrawn.
    """

    mode: Annotated[EvictionRequestMode | None, partial(parse_member, EvictionRequestMode)] = None
    deschedulers: Names = ()
    name: Annotated[str, parse_responder] = "kubevirt-eviction-exporter.io/cooldown"
    evict: bool = True
    cancel: bool = False

    @property
    def responds(self) -> bool:
        """Whether EvictionRequests are answered."""
        return self.mode is EvictionRequestMode.RESPOND


@dataclass(frozen=True)
class Links:
    """The templates of the pages' links to other servers.

    `{alert}` stands for the name of a runbook; without `runbooks`, the pages link to those that the
    exporter serves. `{namespace}`, `{name}` and `{node}` stand for the VM.
    """

    runbooks: Annotated[str | None, parse_runbook_link] = None
    grafana: Annotated[str | None, parse_vm_link] = None
    console: Annotated[str | None, parse_vm_link] = None


@dataclass(frozen=True)
class LogSettings:
    """The log; without a format it is `console` on a terminal, and `json` elsewhere."""

    format: Annotated[str | None, parse_one_of("json", "console")] = None
    level: Annotated[str, parse_one_of("debug", "info", "warning", "error")] = "info"


@dataclass(frozen=True)
class Settings:
    """The whole configuration; `remarks` are warnings for the operator."""

    policy: Policy = field(default_factory=Policy)
    stuck: StuckPolicy = field(default_factory=StuckPolicy)
    listen: Listen = field(default_factory=Listen)
    history: Path | None = None
    namespaces: tuple[str, ...] = ()
    events: bool = False
    kube: KubeSettings = field(default_factory=KubeSettings)
    kubevirt: KubeVirtNames = KUBEVIRT
    limits: Limits = field(default_factory=Limits)
    tls_query: Tls = field(default_factory=Tls)
    tls_metrics: Tls = field(default_factory=Tls)
    tls_admission: Tls = field(default_factory=Tls)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    eviction_requests: EvictionRequestSettings = field(default_factory=EvictionRequestSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    links: Links = field(default_factory=Links)
    log: LogSettings = field(default_factory=LogSettings)
    remarks: tuple[str, ...] = ()

    @property
    def writes(self) -> bool:
        """Whether anything is written into the cluster, which needs the Lease."""
        requests = self.eviction_requests
        return self.events or requests.responds or requests.cancel


def load_settings(path: Path | None) -> Settings:
    """Read a YAML file, or return the defaults if it is None. Raises `InvalidSettings`."""
    return Settings() if path is None else read_settings(read_yaml(path))


def read_settings(document: object, sections: type[Section] = Section) -> Settings:
    """Read a decoded document. Raises `InvalidSettings` with every fault.

    A subclass as `sections` sees each key that is read, with its parser.
    """
    faults: list[str] = []
    root = sections("", document, faults)
    remarks: list[str] = []
    kube = root.section("kube")
    tls = root.section("tls")
    versions = tls.read(TlsVersions())
    settings = Settings(
        policy=read_policy(root.section("policy"), remarks),
        stuck=structs.replace(
            _read(root.section("stuck"), StuckPolicy(), skip=("retry_backoff",)),
            retry_backoff=kube.take(
                "retryBackoff", parse_positive_duration, StuckPolicy().retry_backoff
            ),
        ),
        listen=_read_listen(root.section("listen")),
        history=root.take("history", parse_history, Settings.history),
        namespaces=root.take("namespaces", parse_namespaces, Settings.namespaces),
        events=root.take("events", parse_boolean, Settings.events),
        kube=_read(kube, KubeSettings()),
        kubevirt=_read_names(root.section("kubevirt"), remarks),
        limits=_read(root.section("limits"), Limits()),
        tls_query=_read_tls(tls.section("query"), versions),
        tls_metrics=_read_tls(tls.section("metrics"), versions),
        tls_admission=_read_tls(tls.section("admission"), versions),
        admission=_read(root.section("admission"), AdmissionSettings()),
        eviction_requests=_read(root.section("evictionRequests"), EvictionRequestSettings()),
        auth=_read(root.section("auth"), AuthSettings()),
        links=_read(root.section("links"), Links()),
        log=_read(root.section("log"), LogSettings()),
    )
    tls.close()
    root.close()
    _check_exposure(root, settings)
    _check_admission(root, settings, remarks)
    _check_eviction_requests(root, settings)
    if faults:
        raise InvalidSettings(faults)
    return replace(settings, remarks=tuple(remarks))


def _read(section: Section, default: T, *, skip: tuple[str, ...] = ()) -> T:
    settings = section.read(default, skip=skip)
    section.close()
    return settings


def _read_names(section: Section, remarks: list[str]) -> KubeVirtNames:
    names = KubeVirtNames(
        api_group=section.take("apiGroup", parse_domain, KUBEVIRT.api_group),
        resource_prefix=section.take("resourcePrefix", parse_prefix, KUBEVIRT.resource_prefix),
        label_domain=section.take("labelDomain", parse_domain, KUBEVIRT.label_domain),
    )
    if names.api_group != KUBEVIRT.api_group and not section.has("labelDomain"):
        remarks.append(
            "kubevirt.labelDomain: a platform that renames kubevirt.apiGroup renames the labels of"
            " launcher pods, too; without their domain none is found"
        )
    section.close()
    return names


def _read_listen(section: Section) -> Listen:
    listen = _read(section, Listen())
    local = () if listen.local is None else (listen.local,)
    listeners = listen.query + listen.metrics + listen.admission + local
    addresses = [address for address in listeners if address.port or address.path]
    for twice in sorted({str(a) for a in addresses if addresses.count(a) > 1}):
        section.report("", f"{twice} is listed twice")
    return listen


def _check_exposure(root: Section, settings: Settings) -> None:
    """Require encryption and authentication for listeners that the network can reach."""
    auth, tls = settings.auth, settings.tls_query
    is_safe = tls.cert_file and (tls.client_ca_file or auth.query is Authentication.KUBERNETES)
    for address in settings.listen.query:
        if not (address.is_local or is_safe or auth.allow_insecure_query):
            root.report(
                "listen.query",
                f"{address} is reachable from the network: set tls.query.certFile and keyFile, and"
                " either tls.query.clientCAFile or auth.query: kubernetes. Or listen on a loopback"
                " address or a unix socket, or set auth.allowInsecureQuery: true",
            )
    for listener, addresses, asks, files in (
        ("query", settings.listen.query, auth.query, settings.tls_query),
        ("metrics", settings.listen.metrics, auth.metrics, settings.tls_metrics),
    ):
        is_exposed = not all(address.is_local for address in addresses)
        if asks is Authentication.KUBERNETES and is_exposed and not files.cert_file:
            root.report(
                f"auth.{listener}",
                "with kubernetes, callers send tokens, which would not be encrypted:"
                f" set tls.{listener}.certFile and keyFile",
            )


def _check_admission(root: Section, settings: Settings, remarks: list[str]) -> None:
    """Check the webhook's listener, and warn about unsuitable users and groups."""
    admission, addresses = settings.admission, settings.listen.admission
    listed = admission.users + admission.groups
    if any(address.path for address in addresses):
        root.report(
            "listen.admission", "the API server cannot call a unix socket: expected host:port"
        )
    elif addresses and not settings.tls_admission.cert_file:
        root.report(
            "listen.admission",
            "the API server calls webhooks only over TLS: set tls.admission.certFile and keyFile",
        )
    if admission.mode is AdmissionMode.ENFORCE and not listed:
        root.report(
            "admission.users",
            "the mode enforce needs users or groups, whose evictions may then be denied",
        )
    elif addresses and not listed:
        remarks.append("admission.users: no user and no group is listed, so no eviction is denied")
    if (listed or admission.observe) and not addresses:
        remarks.append("admission: listen.admission is not set, so the webhook is off")
    remarks += [
        f"admission.users: {user} retries a denied eviction without a pause: do not list it"
        for user in admission.users
        if _RETRIES_AT_ONCE.search(user)
    ]
    if KUBERNETES_EVICTOR in admission.users:
        remarks.append(
            f"admission.users: {KUBERNETES_EVICTOR} evicts for all EvictionRequests, people's too:"
            " do not list it"
        )
    remarks += [
        f"admission.groups: {group} contains people too, and their `kubectl drain` would wait"
        for group in admission.groups
        if group in _GROUPS_OF_PEOPLE
    ]


def _check_eviction_requests(root: Section, settings: Settings) -> None:
    requests = settings.eviction_requests
    if requests.cancel and requests.mode is EvictionRequestMode.OFF:
        root.report(
            "evictionRequests.cancel",
            "with the mode off nobody sees who withdraws: expected observe or respond",
        )


def _read_tls(section: Section, versions: TlsVersions) -> Tls:
    tls = _read(section, Tls(versions=versions), skip=("versions",))
    if (tls.cert_file is None) != (tls.key_file is None):
        section.report("", "expected both certFile and keyFile, or neither")
    if tls.client_ca_file is not None and tls.cert_file is None:
        section.report("clientCAFile", "expected certFile and keyFile too")
    return tls
