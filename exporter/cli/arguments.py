"""The command line's parser."""

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from exporter import __version__
from exporter.engine.facts.model import Instant
from exporter.kube.objects.instants import parse_instant
from exporter.runbooks import read_runbook
from exporter.settings.values import Address, parse_address, parse_positive_duration


if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001
    _Group: TypeAlias = argparse.ArgumentParser | argparse._ArgumentGroup  # noqa: SLF001


T = TypeVar("T")

MAX_DAYS = 3650
"""The longest scenario, in days. Without a limit, its dates could pass the year 9999."""
MAX_VMS = 20_000
"""The most VMs of the demo: more take minutes to create."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m exporter`."""
    parser = argparse.ArgumentParser(
        prog="python -m exporter",
        description="Says which VMs of a KubeVirt cluster must not be moved now.\n"
        "Without a command it watches the cluster and serves the query API and metrics.",
        epilog="Example:\n  python -m exporter --kubeconfig ~/.kube/config --config exporter.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_kubeconfig(_add_shared(parser))
    parser.set_defaults(config=None, kubeconfig=None, log_format=None, log_level=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_asking(
        commands, "explain", "Why may this VM not be moved now?", "explain bank/churn-1"
    ).add_argument(
        "vmi",
        type=_vmi_or_name,
        metavar="[NAMESPACE/]NAME",
        help="the name of the VMI, not of its pod; without a namespace, it is searched for in all"
        " namespaces",
    )
    _add_asking(
        commands,
        "status",
        "Does this exporter work, what is stuck, which VMs are blocked?",
        "status",
    ).add_argument("--all", action="store_true", help="show every row of each list, not only 20")
    node = _add_asking(
        commands, "node", "Can this node be emptied, and what would a drain do?", "node node-1"
    )
    node.add_argument(
        "node", type=_node, nargs="?", metavar="NAME", help="the node's name (default: all nodes)"
    )
    node.add_argument("--all", action="store_true", help="show every row of each list, not only 20")
    node.add_argument(
        "--watch", action="store_true", help="with NAME: follow its drain until it is over"
    )
    _add_command(
        commands,
        "runbook",
        "What do I do about this alert, or about this step of explain?",
        "runbook KubeVirtEvacuationStuck",
    ).add_argument(
        "runbook",
        type=_with_message(read_runbook),
        metavar="NAME",
        help="the alert's name, or what `explain` prints as runbook: KubeVirtEvacuationStuck#quota",
    )
    check = _add_command(
        commands, "check", "Is this configuration file valid?", "check --config exporter.yaml"
    )
    _add_file(check, "--config", "the settings, as YAML", required=True)
    check.add_argument(
        "--explain",
        dest="explained",
        type=_vmi,
        metavar="NAMESPACE/NAME",
        help="show which entry of policy.overrides applies to this VM; if that depends on its"
        " labels or its priority class, they are read from the cluster",
    )
    _add_kubeconfig(check)
    _add_record(commands)
    _add_replay(commands)
    demo = _add_command(
        commands, "demo", "The same program on a simulated cluster.", "demo --speed 10 --vms 100"
    )
    _add_shared(demo)
    made = demo.add_argument_group("the simulated cluster")
    _add_seed(made)
    made.add_argument(
        "--speed", type=_speed, default=1.0, metavar="X", help="run X times faster (default: 1)"
    )
    made.add_argument(
        "--vms",
        type=_vms,
        default=24,
        metavar="N",
        help=f"VMs, at most {MAX_VMS:,} (default: 24)",
    )
    made.add_argument("--nodes", type=_count, default=4, metavar="N", help="nodes (default: 4)")
    made.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="the address of the query API; the metrics are on the next port (default:"
        " 127.0.0.1:9810)",
    )
    made.add_argument(
        "--evictor",
        choices=("plugin", "webhook", "none"),
        default="plugin",
        help="plugin: the descheduler asks for verdicts; webhook: the admission webhook denies its"
        " evictions; none: nothing blocks its evictions (default: plugin)",
    )
    made.add_argument(
        "--eviction-requests",
        action="store_true",
        help="the cluster has Kubernetes' EvictionRequests, and the exporter answers them",
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Wrong arguments end the program with exit code 2."""
    return make_parser().parse_args(arguments)


def _add_command(
    commands: "_Commands", name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command with a summary and an example."""
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"Example:\n  python -m exporter {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_record(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "record",
        "Record the cluster to a file that `replay` can read.",
        "record --output cluster.ndjson.gz --for 168h",
    )
    _add_file(
        parser,
        "--output",
        "the recording, compressed if the name ends in .gz; no file is overwritten",
        required=True,
    )
    parser.add_argument(
        "--for",
        dest="lasts",
        type=_duration,
        metavar="DURATION",
        help="stop after this time, such as 2h30m (default: at Ctrl-C or SIGTERM)",
    )
    _add_scenario(parser)
    _add_kubeconfig(_add_shared(parser))


def _add_replay(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "replay",
        "What would these policies have done?",
        "replay --policy ours --policy mine=mine.yaml week.ndjson.gz",
    )
    _add_file(
        parser,
        "file",
        "a recording, or the output of `kubectl get vmi -A -w -o json --output-watch-events`;"
        " plain or gzip, - is standard input",
        nargs="?",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help="reference, restarted, ours, recommended, successes or none; or NAME=FILE, to use"
        " policy: and stuck: of this configuration file; can be repeated (default: all of these"
        " but restarted)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_scenario(parser)
    prometheus = parser.add_argument_group(
        "instead of a recording: KubeVirt's metrics in a Prometheus"
    )
    prometheus.add_argument("--prometheus", metavar="URL", help="the address of the Prometheus")
    prometheus.add_argument(
        "--cluster", metavar="NAME", help="which cluster (label `cluster`), if there are several"
    )
    for flag, name, meaning in (("--from", "began", "first"), ("--to", "ended", "last")):
        prometheus.add_argument(
            flag, dest=name, type=_instant, metavar="T", help=f"the {meaning} instant, RFC 3339"
        )
    prometheus.add_argument(
        "--step",
        type=_duration,
        default=60.0,
        metavar="DURATION",
        help="time between two samples (default: 60s)",
    )
    _add_credentials(prometheus, "https")


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    scenario = parser.add_argument_group("instead of a cluster: a simulated one")
    scenario.add_argument(
        "--scenario",
        choices=("week-pilot", "week-hand-offs"),
        help="week-pilot: a week on ten nodes with 148 VMs, of which four are recreated and count"
        " twice; week-hand-offs: on four nodes with twelve VMs, where migrations by hand lose their"
        " targets",
    )
    _add_seed(scenario)
    scenario.add_argument(
        "--days", type=_days, default=7.0, metavar="X", help="days to simulate (default: 7)"
    )


def _add_asking(
    commands: "_Commands", name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command that queries a running exporter."""
    parser = _add_command(commands, name, summary, example)
    parser.add_argument("--json", action="store_true", help="print the answer of the API")
    asked = parser.add_argument_group("the exporter to query")
    asked.add_argument(
        "--url",
        help="its query listener: http://HOST:PORT, https://HOST:PORT or unix:/PATH"
        " (default: $KUBEVIRT_EVICTION_EXPORTER_URL, else the socket in the exporter's pod, else"
        " http://127.0.0.1:9810)",
    )
    _add_credentials(asked, "https, a unix socket")
    _add_file(asked, "--cert-file", "the client certificate, if the exporter requires one")
    _add_file(asked, "--key-file", "the key of that certificate (default: in the same file)")
    return parser


def _add_credentials(group: "_Group", safe: str) -> None:
    _add_file(
        group, "--token-file", f"the bearer token; it is sent only over {safe} or to this machine"
    )
    _add_file(group, "--ca-file", "the CA of the server (default: those of the system)")


def _add_seed(group: "_Group") -> None:
    group.add_argument("--seed", type=int, default=1, metavar="N", help="random seed (default: 1)")


def _add_file(group: "_Group", name: str, help_: str, **how: Any) -> None:
    group.add_argument(name, type=Path, metavar="FILE", help=help_, **how)


def _add_shared(parser: argparse.ArgumentParser) -> "_Group":
    """Add the options of the main job that some commands have too.

    They have no default. So a value before the command counts, unless the option is given again
    after the command.
    """
    group = parser.add_argument_group("configuration")
    _add_file(
        group,
        "--config",
        "the settings, as YAML (default: each setting's default)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--log-format",
        choices=("json", "console"),
        default=argparse.SUPPRESS,
        help="instead of log.format (default: console on a terminal, else json)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=argparse.SUPPRESS,
        help="instead of log.level (default: info)",
    )
    return group


def _add_kubeconfig(group: "_Group") -> None:
    _add_file(
        group,
        "--kubeconfig",
        "credentials (default: the pod's service account, else the default kubeconfig)",
        default=argparse.SUPPRESS,
    )


def _with_message(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Turn a parser's ValueError into an ArgumentTypeError, whose message argparse prints."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _is_name(text: str) -> bool:
    """Whether a text may be a name: in a URL, a slash or dots would change the path."""
    return bool(text) and "/" not in text and text not in (".", "..") and text.isprintable()


def _split_vmi(text: str, expected: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not (_is_name(namespace) and _is_name(name)):
        raise ValueError(f"{text!r}: expected {expected}")
    return namespace, name


@_with_message
def _vmi(text: str) -> tuple[str, str]:
    return _split_vmi(text, "NAMESPACE/NAME")


@_with_message
def _vmi_or_name(text: str) -> tuple[str, str]:
    """A namespace and a name; the namespace is "" if the text is only a name."""
    return ("", text) if _is_name(text) else _split_vmi(text, "NAME or NAMESPACE/NAME")


@_with_message
def _address(text: str) -> Address:
    address = parse_address(text)
    if address.path or address.port > 65534:
        raise ValueError("expected HOST:PORT, with a port below 65535")
    return address


@_with_message
def _node(text: str) -> str:
    if not _is_name(text):
        raise ValueError(f"{text!r}: expected a node's name")
    return text


@_with_message
def _instant(text: str) -> Instant:
    instant = parse_instant(text)
    if instant is None:
        raise ValueError(f"expected an instant such as 2026-01-05T10:00:00Z, got {text!r}")
    return instant


def _number(
    convert: Callable[[str], T], is_valid: Callable[[T], bool], expected: str
) -> Callable[[str], T]:
    """A parser of numbers."""

    def parse_number(text: str) -> T:
        with suppress(ValueError):
            value = convert(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")

    return parse_number


_duration = _with_message(parse_positive_duration)
_count = _number(int, lambda value: value >= 1, "a whole number, at least 1")
_vms = _number(int, lambda value: 1 <= value <= MAX_VMS, f"a whole number, 1 to {MAX_VMS:,}")
_speed = _number(float, lambda value: 0 < value < math.inf, "a number, more than 0")
_days = _number(
    float, lambda value: 0 < value <= MAX_DAYS, f"more than 0 and at most {MAX_DAYS:,} days"
)
