"""What can be configured, and the errors for wrong configurations."""

import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exporter.engine.facts.overrides import OverrideChooser
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.settings import MinVersion, Settings, Tls, TlsVersions, load_settings, read_settings
from exporter.settings.document import InvalidSettings, _Loader
from exporter.settings.values import Address, parse_address, parse_duration
from exporter.text import format_duration
from tests.support.builders import a_vmi


def faults_of(document: object) -> list[str]:
    """The errors of a configuration."""
    with pytest.raises(InvalidSettings) as invalid:
        read_settings(document)
    assert str(invalid.value) == "\n".join(invalid.value.faults)
    return invalid.value.faults


def written(tmp_path: Path, text: str) -> Path:
    """Write a configuration file with this text."""
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


CASES = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8"))


# --- defaults and whole documents


@pytest.mark.parametrize("text", ["", "null\n", "{policy: null, namespaces: null}", "{policy: {}}"])
def test_defaults(tmp_path: Path, text: str) -> None:
    """Absent, null and empty values mean the defaults."""
    assert load_settings(written(tmp_path, text)) == Settings()


def test_the_defaults_are_those_of_the_contract() -> None:
    """The defaults of the main settings are as documented."""
    settings = load_settings(None)
    assert settings.policy == Policy(
        migration_cooldown=900.0,
        max_migration_cooldown=21_600.0,
        migration_history_window=86_400.0,
        count_failed_migrations=True,
        guard_pending_migrations=True,
        guard_evacuations=True,
    )
    assert settings.stuck == StuckPolicy(
        after=1_800.0, failed_attempts=3, migration_timeout=7_200.0, external=None
    )
    assert [str(address) for address in settings.listen.query] == ["127.0.0.1:9810"]
    assert [str(address) for address in settings.listen.metrics] == ["0.0.0.0:9811"]
    assert (settings.history, settings.namespaces, settings.remarks) == (None, (), ())
    assert settings.kube.stale_after == 180.0


WHOLE = """
policy:
  migrationCooldown: 20m
  maxMigrationCooldown: 5h
  migrationHistoryWindow: 48h
  countFailedMigrations: false
  guards: {pendingMigrations: false, evacuations: false, platformUpdate: true}
stuck: {after: 1h, failedAttempts: 5, migrationTimeout: 3h, external: 12h}
listen:
  query: [127.0.0.1:1, unix:/run/q.sock]
  metrics: "[::]:2"
  hosts: [b, a, b]
  page: true
  admission: "[::1]:3"
  local: unix:/run/l.sock
history: file:/history
events: true
namespaces: [b, a, b]
kube:
  syncTimeout: 10s
  waitForKubeVirt: true
  staleAfter: 1m
  deadAfter: 2m
  readTimeout: 3m
  watchTimeout: 4m
  rejectedRetry: 6m
  retryBackoff: 2s
  historyInterval: 8s
kubevirt:
  apiGroup: internal.example
  resourcePrefix: Internal
  labelDomain: kubevirt.internal.example
limits:
  bodyBytes: 1000
  candidates: 10
  vmiSeries: 30
  connections: 40
  requestTimeout: 5s
  idleTimeout: 6s
tls:
  minVersion: VersionTLS13
  cipherSuites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  query: {certFile: /c, keyFile: /k, clientCAFile: /a}
  metrics: {certFile: /c2, keyFile: /k2}
  admission: {certFile: /c3, keyFile: /k3, clientCAFile: /a3}
admission:
  mode: enforce
  users: [descheduler, descheduler]
  groups: [evictors]
  maxHold: 1h
  observe: true
evictionRequests:
  mode: respond
  deschedulers: [example.com/descheduler]
  name: example.com/hold
  evict: false
  cancel: true
auth:
  query: kubernetes
  metrics: kubernetes
  allowInsecureQuery: true
  cache: 7s
  socketMode: "0600"
links: {runbooks: "http://b/{alert}", grafana: "https://g/{node}", console: "https://c/{namespace}/{name}"}
log: {format: json, level: debug}
"""


def flatten(settings: object, path: str = "") -> dict[str, object]:
    """Each value of the settings by its path."""
    if isinstance(settings, Address | Path):
        return {path: settings}
    if isinstance(settings, msgspec.Struct):
        values = msgspec.structs.asdict(settings)
    elif dataclasses.is_dataclass(settings):
        values = vars(settings)
    else:
        return {path: settings}
    leaves: dict[str, object] = {}
    for name, value in values.items():
        leaves |= flatten(value, f"{path}.{name}".lstrip("."))
    return leaves


def test_every_key(tmp_path: Path) -> None:
    """Every key is read, and sets its field."""
    settings = load_settings(written(tmp_path, WHOLE))
    used, defaults = flatten(settings), flatten(Settings())
    assert {path for path, value in used.items() if value == defaults[path]} == {
        "policy.block",
        "policy.overrides",
        "tls_metrics.client_ca_file",
        "remarks",
    }
    assert settings.listen.query == (Address("127.0.0.1", 1), Address(path="/run/q.sock"))
    assert settings.listen.hosts == settings.namespaces == ("b", "a")
    versions = TlsVersions(MinVersion.TLS_1_3, ("ECDHE-RSA-AES128-GCM-SHA256",))
    assert settings.tls_query == Tls(Path("/c"), Path("/k"), Path("/a"), versions)
    assert settings.admission.users == ("descheduler",)
    assert settings.auth.socket_mode == 0o600


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, text) for text in ("1:30", "0777", "-012", "01.5", "1_000", "0b11", "1:30.5")),
        *((text, text) for text in ("yes", "off", "Y", "2026-11-26", "=", "0x", "1.2.3")),
        *(("12", 12), ("+12", 12), ("-3", -3), ("0", 0), ("0o17", 15), ("0x1F", 31)),
        *(("1.5", 1.5), ("-.5", -0.5), ("1e3", 1000.0), ("0.5E-1", 0.05), ("-.inf", -math.inf)),
        *(("true", True), ("FALSE", False), ("~", None), ("", None), ("Null", None)),
    ],
    ids=str,
)
def test_plain_scalars(text: str, value: object) -> None:
    """A scalar without quotes is read as in YAML 1.2; with a leading 0 it is text."""
    (read,) = yaml.load(f"[{text or 'null'}]", _Loader)  # noqa: S506 (a SafeLoader)
    assert (type(read), read) == (type(value), value)


def test_plain_scalars_in_settings(tmp_path: Path) -> None:
    """A file mode needs no quotes, and an error quotes what the file contains."""
    assert load_settings(written(tmp_path, "auth: {socketMode: 0600}")).auth.socket_mode == 0o600
    with pytest.raises(InvalidSettings, match="a duration such as 15m or 1h30m, got '1:30'"):
        load_settings(written(tmp_path, "stuck: {after: 1:30}"))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
"""An alias bomb: the last list stands for nine to the power of ten values."""


def test_an_alias_bomb_ends_within_a_second(tmp_path: Path) -> None:
    """A file with many aliases is refused with a sentence of its own, before they are resolved."""
    path = written(tmp_path, f"{BOMB}namespaces: *a9\n")
    began = time.monotonic()
    with pytest.raises(InvalidSettings) as invalid:
        load_settings(path)
    assert time.monotonic() - began < 1
    assert invalid.value.faults == [
        f"{path}: line 3: more than 10 aliases (*name): write the values instead"
    ]


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    """YAML anchors and merge keys work."""
    text = "kube: &k {staleAfter: 1m}\nstuck: {<<: {after: 1h}, failedAttempts: 4}\nlimits: {}\n"
    settings = load_settings(written(tmp_path, text))
    assert settings.kube.stale_after == 60.0
    assert (settings.stuck.after, settings.stuck.failed_attempts) == (3_600.0, 4)


# --- mistakes


@pytest.mark.parametrize("case", CASES["faults"], ids=lambda case: case["says"][0][:40])
def test_faults(case: dict[str, Any]) -> None:
    """All faults of a configuration are reported at once, with their path and what was expected."""
    assert faults_of(case["config"]) == case["says"]


@pytest.mark.parametrize("case", CASES["remarks"], ids=lambda case: str(case["config"])[:60])
def test_remarks(case: dict[str, Any]) -> None:
    """A valid configuration that is probably a mistake gets a remark; others get none."""
    remarks = read_settings(case["config"]).remarks
    assert len(remarks) == len(case["says"])
    for remark, beginning in zip(remarks, case["says"], strict=True):
        assert remark.startswith(beginning)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("policy: {}\npolicy: {}\n", "duplicate key 'policy'", id="twice"),
        pytest.param("stuck: {after: 1h, after: 2h}\n", "duplicate key 'after'", id="twice-deep"),
        pytest.param("policy: {\n", "not YAML", id="open-brace"),
        pytest.param("a: 1\n---\nb: 2\n", "not YAML", id="two-documents"),
        pytest.param("a: !!python/object:os.system x\n", "not YAML", id="python-tag"),
        pytest.param("? [a]\n: 1\n", "not YAML", id="a-list-as-key"),
        pytest.param("a: !!bool x\n", "not YAML", id="no-such-boolean"),
        pytest.param("a: !!timestamp x\n", "not YAML", id="no-such-timestamp"),
        pytest.param("a: !!map x\n", "not YAML", id="a-scalar-tagged-as-mapping"),
        pytest.param("[" * 1_500, "not YAML", id="too-deep"),
        pytest.param("a: \0\n", "not YAML", id="control-character"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str, why: str) -> None:
    """A file that is not YAML, or has a key twice, is an error that names the file."""
    path = written(tmp_path, text)
    with pytest.raises(InvalidSettings) as invalid:
        load_settings(path)
    (fault,) = invalid.value.faults
    assert fault.startswith(f"{path}: ")
    assert why in fault


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, or a file that is not text, is an error."""
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "binary"):
        if path.name == "binary":
            path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InvalidSettings, match="cannot be read"):
            load_settings(path)


# --- durations


GO_DURATIONS = {
    **dict.fromkeys((0, "0", "+0", "-0", "0s", "-0s", "0.3ns"), 0.0),
    **dict.fromkeys(("1h30m", "30m1h", "1.5h"), 5_400.0),
    "90s": 90.0,
    "+90s": 90.0,
    "15m": 900.0,
    "1h30m5s": 5_405.0,
    "1m1m": 120.0,
    ".5s": 0.5,
    "1.s": 1.0,
    "100ms": 0.1,
    "0.1s": 0.1,
    "7us": 7e-6,
    "7µs": 7e-6,
    "7μs": 7e-6,
    "7ns": 7e-9,
    "2562047h47m16.854775807s": 9_223_372_036.854_775_807,
}
SPELT_WRONGLY = ["", "+", "-", "15", "1.5", "s", ".s", "1d", "1H", "1h30", "1e3s", "1.2.3s", "1_0s"]
SPELT_WRONGLY += ["+-5m", "-+5m", "--5m", "inf"]
WITH_SPACES = ["1 h", " 1h", "1h ", "1h\n", "\u0661s"]
OF_OTHER_TYPES: list[object] = [5, 1.5, 0.0, False, True, None, [], {}]


@pytest.mark.parametrize(("text", "seconds"), GO_DURATIONS.items(), ids=repr)
def test_go_durations(text: object, seconds: float) -> None:
    """A duration is written as in Go."""
    assert parse_duration(text) == pytest.approx(seconds, abs=1e-12)


@pytest.mark.parametrize("text", [*SPELT_WRONGLY, *WITH_SPACES, *OF_OTHER_TYPES], ids=repr)
def test_invalid_durations(text: object) -> None:
    """A value that is no duration is an error that says how a duration is written."""
    with pytest.raises(ValueError, match="expected a duration such as 15m or 1h30m, got "):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("-1ns", "must not be negative, got '-1ns'"), ("-1h30m", "must not be negative")]
    + [
        (text, "longer than any Go duration")
        for text in ("2562048h", "9223372037s", "9" * 400 + "h")
    ],
    ids=lambda text: text[:20],
)
def test_durations_out_of_range(text: str, why: str) -> None:
    """A negative duration and a duration too long for Go each have their own error."""
    with pytest.raises(ValueError, match=why):
        parse_duration(text)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        pytest.param(30, "got 30: it needs a unit, as in 30m", id="number"),
        pytest.param(1.5, "got 1.5: it needs a unit, as in 1.5m", id="fraction"),
        pytest.param("900", "got '900': it needs a unit, as in 900m", id="number-as-text"),
        pytest.param("1d", "got '1d': days are not supported, write 24h", id="day"),
        pytest.param("7d", "got '7d': days are not supported, write 168h", id="days"),
        pytest.param("1d12h", "got '1d12h': days are not supported, write 24h", id="day-and-hours"),
        pytest.param(-5, "got -5", id="negative"),
        pytest.param(True, "got True", id="truth"),
        pytest.param(float("inf"), "got inf", id="infinite"),
        pytest.param("soon", "got 'soon'", id="words"),
    ],
)
def test_near_durations(value: object, hint: str) -> None:
    """The error for a number asks for a unit; the error for days gives the hours."""
    with pytest.raises(ValueError, match=f"{re.escape(hint)}$"):
        parse_duration(value)


@given(seconds=st.integers(0, 9_223_372_036))
def test_durations_round_trip(seconds: int) -> None:
    """A duration of whole seconds does not change when it is formatted and parsed again."""
    assert parse_duration(format_duration(float(seconds))) == seconds


# --- addresses


NO_ADDRESSES: dict[object, str] = {
    **dict.fromkeys(
        ("localhost", "localhost:", "localhost:http", "localhost:65536", "localhost:-1"),
        "expected host:port or unix:/path",
    ),
    **dict.fromkeys(("localhost:²", 9810, None), "expected host:port or unix:/path"),
    **dict.fromkeys(("unix:/\0", "a\0:80", "unix:/a\n"), "expected host:port or unix:/path, got"),
    "::1:9810": "an IPv6 address needs brackets",
    **dict.fromkeys(("unix:run/x", "unix:"), "with an absolute path"),
}


@pytest.mark.parametrize(("text", "why"), NO_ADDRESSES.items(), ids=repr)
def test_invalid_addresses(text: object, why: str) -> None:
    """A value that is no address is an error that says how an address is written."""
    with pytest.raises(ValueError, match=why):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "address", "told"),
    [
        ("127.0.0.1:9810", Address("127.0.0.1", 9810), "127.0.0.1:9810"),
        (":9810", Address("0.0.0.0", 9810), "0.0.0.0:9810"),  # noqa: S104 (nothing is bound)
        ("localhost:0", Address("localhost", 0), "localhost:0"),
        ("[::1]:9810", Address("::1", 9810), "[::1]:9810"),
        ("unix:/run/x.sock", Address(path="/run/x.sock"), "unix:/run/x.sock"),
    ],
    ids=["tcp", "no-host", "any-port", "ipv6", "unix"],
)
def test_addresses(text: str, address: Address, told: str) -> None:
    """An address is a host and port, or the path of a unix socket, and can be printed."""
    assert parse_address(text) == address
    assert str(address) == told


@pytest.mark.parametrize(
    ("query", "exposed"),
    [
        (":9810", ["0.0.0.0:9810"]),
        (["unix:/run/q.sock", "exporter.shop:1", "[::]:2"], ["exporter.shop:1", "[::]:2"]),
        (["127.1.2.3:1", "[::1]:2", "localhost:3", "unix:/run/q.sock"], []),
    ],
    ids=["everywhere", "some", "none"],
)
def test_an_unprotected_query_api_on_the_network_is_an_error(
    query: object, exposed: list[str]
) -> None:
    """On the network the query API needs TLS and authentication, or `auth.allowInsecureQuery`."""
    document: dict[str, Any] = {"listen": {"query": query, "metrics": ":9811"}}
    if exposed:
        assert faults_of(document) == [
            f"listen.query: {address} is reachable from the network: set tls.query.certFile and"
            " keyFile, and either tls.query.clientCAFile or auth.query: kubernetes. Or listen on a"
            " loopback address or a unix socket, or set auth.allowInsecureQuery: true"
            for address in exposed
        ]
    else:
        read_settings(document)
    allowed = read_settings(document | {"auth": {"allowInsecureQuery": True}})
    assert allowed.auth.allow_insecure_query
    pair = {"certFile": "/c", "keyFile": "/k"}
    for safe in (
        {"tls": {"query": pair}, "auth": {"query": "kubernetes"}},
        {"tls": {"query": {**pair, "clientCAFile": "/a"}}},
    ):
        read_settings(document | safe)


# --- exceptions from the policy

MATCHES = json.loads(
    (Path(__file__).parents[1] / "data" / "vectors" / "overrides.json").read_text()
)


@pytest.mark.parametrize("case", MATCHES, ids=[case["case"] for case in MATCHES])
def test_which_override_a_vm_gets(case: dict[str, Any]) -> None:
    """A VM gets the first override whose keys all match."""
    policy = read_settings({"policy": {"overrides": case["overrides"]}}).policy
    vmi = case["vmi"]
    traits = (vmi["namespace"], vmi["labels"], vmi["priorityClass"])
    assert policy.choose(*traits) == OverrideChooser(policy).choose(*traits) == case["expected"]


def test_whether_the_namespace_alone_decides() -> None:
    """A namespace decides alone, unless its first entry also needs labels or priority classes."""
    overrides = [
        {"name": "dbs", "match": {"namespaces": ["db-*"]}},
        {"name": "gold", "match": {"namespaces": ["shop"], "vmiLabels": {"tier": "gold"}}},
        {"name": "batch", "match": {"namespaces": ["lab"], "priorityClasses": ["batch"]}},
    ]
    policy = read_settings({"policy": {"overrides": overrides}}).policy
    chosen = [policy.find_override_of_namespace(name) for name in ("db-1", "shop", "lab", "web")]
    assert chosen == ["dbs", None, None, ""]


def test_what_an_override_leaves_out_is_the_policy_s() -> None:
    """The values that an override does not set come from the policy, and then from the defaults."""
    entry = {"name": "db", "match": {"namespaces": ["db"]}, "migrationCooldown": "1h"}
    policy = read_settings({"policy": {"maxMigrationCooldown": "12h", "overrides": [entry]}}).policy
    own = policy.of(a_vmi(override="db"))
    assert (own.migration_cooldown, own.max_migration_cooldown) == (3600.0, 43_200.0)
    assert own.migration_history_window == policy.migration_history_window
    assert policy.of(a_vmi()) is policy


def test_an_entry_that_is_narrower_in_one_key_is_reached() -> None:
    """A later entry is accepted if an earlier entry matches only some of its VMs."""
    narrow = {"name": "a", "match": {"namespaces": ["db-*"], "vmiLabels": {"tier": "gold"}}}
    wide = {"name": "b", "match": {"namespaces": ["db-*"]}}
    policy = read_settings({"policy": {"overrides": [narrow, wide]}}).policy
    assert [override.name for override in policy.overrides] == ["a", "b"]
