"""The command line: what can be typed."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from exporter import __version__
from exporter.engine.model import Instant, Seconds
from exporter.kube.kubevirt import parse_instant
from exporter.settings import parse_duration


if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


MOST_DAYS = 3650
"""How long a made-up cluster may go on: a calendar ends somewhere."""
MOST_VMS = 20_000
"""VMs of the demo: more take minutes to create."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m exporter`."""
    parser = argparse.ArgumentParser(
        prog="python -m exporter",
        description="Tells a KubeVirt cluster which VMs must not be moved now.\n"
        "Without a command it watches the cluster and serves the query API and metrics.",
        epilog="Example:\n  python -m exporter --kubeconfig ~/.kube/config --config exporter.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_shared(parser, top=True)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_asking(
        commands, "explain", "Why may this VM not be moved now?", "explain shop/db1"
    ).add_argument("vmi", type=_vmi, metavar="NAMESPACE/NAME", help="the VMI's, not its pod's")
    _add_asking(
        commands, "status", "Can this exporter be trusted, what is stuck, who is held?", "status"
    ).add_argument("--all", action="store_true", help="every row of each list, not 20")
    check = _add_command(
        commands, "check", "Is this configuration file valid?", "check --config exporter.yaml"
    )
    check.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML")
    _add_record(commands)
    _add_replay(commands)
    demo = _add_command(
        commands, "demo", "The same program on a simulated cluster.", "demo --speed 10 --vms 100"
    )
    _add_shared(demo, top=False)
    made = demo.add_argument_group("the simulated cluster")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="what happens (default: 1)")
    made.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="times faster (default: 1)"
    )
    made.add_argument(
        "--vms",
        type=_vms,
        default=24,
        metavar="N",
        help=f"VMs, at most {MOST_VMS:,} (default: 24)",
    )
    made.add_argument("--nodes", type=_count, default=4, metavar="N", help="nodes (default: 4)")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; wrong arguments exit with 2."""
    return make_parser().parse_args(arguments)


def _add_command(
    commands: "_Commands", name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    """A command with its line in the list of commands and an example below its options."""
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
        "Write what the cluster says to a file that `replay` plays.",
        "record --output cluster.ndjson.gz --for 168h",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the recording, compressed where the name ends in .gz; nothing is overwritten",
    )
    parser.add_argument(
        "--for",
        dest="lasts",
        type=_duration,
        metavar="DURATION",
        help="end by itself after so long, as in 2h30m (default: until Ctrl-C or SIGTERM)",
    )
    _add_scenario(parser)
    _add_shared(parser, top=False)
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="credentials"
    )


def _add_replay(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "replay",
        "What would these settings have done?",
        "replay --policy ours --policy mine=mine.yaml week.ndjson.gz",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="a recording, or what `kubectl get vmi -A -w -o json --output-watch-events` writes;"
        " plain or gzip, - is standard input",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help="reference, ours, none, or a name for the policy: and stuck: of a configuration file;"
        " as often as wanted (default: reference, ours and none)",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it too: .png or .svg (needs Matplotlib)"
    )
    _add_scenario(parser)
    asked = parser.add_argument_group("instead of a recording: KubeVirt's metrics in a Prometheus")
    asked.add_argument("--prometheus", metavar="URL", help="its address")
    for flag, name, meaning in (("--from", "began", "first"), ("--to", "ended", "last")):
        asked.add_argument(
            flag, dest=name, type=_instant, metavar="T", help=f"the {meaning} instant, RFC 3339"
        )
    asked.add_argument(
        "--step",
        type=_duration,
        default=60.0,
        metavar="DURATION",
        help="how closely to look (default: 60s)",
    )
    asked.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the bearer token to send; over https or to this machine only",
    )
    asked.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="the authorities of its certificate (default: the system's)",
    )


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    made = parser.add_argument_group("instead of a cluster: a made-up one")
    made.add_argument(
        "--scenario", choices=("week-pilot",), help="ten nodes, 148 VMs, a week from Monday on"
    )
    made.add_argument("--seed", type=int, default=1, metavar="N", help="what happens (default: 1)")
    made.add_argument("--days", type=_days, default=7.0, metavar="X", help="how long (default: 7)")


def _add_asking(
    commands: "_Commands", name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    """A command that asks a running exporter."""
    parser = _add_command(commands, name, summary, example)
    parser.add_argument("--json", action="store_true", help="the API's own answer")
    asked = parser.add_argument_group("the exporter that is asked")
    asked.add_argument(
        "--url",
        help="its query listener: http://HOST:PORT, https://HOST:PORT or unix:/PATH"
        " (default: $EXPORTER, else http://127.0.0.1:9810)",
    )
    asked.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the bearer token to send; over https, a unix socket or to this machine only",
    )
    asked.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="the authorities of its certificate (default: the system's)",
    )
    asked.add_argument(
        "--cert-file", type=Path, metavar="FILE", help="the certificate that it wants of a caller"
    )
    asked.add_argument(
        "--key-file", type=Path, metavar="FILE", help="that certificate's key (default: its file)"
    )
    return parser


def _add_shared(parser: argparse.ArgumentParser, *, top: bool) -> None:
    """Options of the main job and of the demo; a command's own silence overrides nothing."""
    absent = None if top else argparse.SUPPRESS
    told = parser.add_argument_group("configuration")
    told.add_argument(
        "--config", type=Path, metavar="FILE", default=absent, help="YAML; without: defaults"
    )
    if top:
        told.add_argument(
            "--kubeconfig",
            type=Path,
            metavar="FILE",
            help="credentials; without: the pod's service account, else the default kubeconfig",
        )
    told.add_argument(
        "--log-format",
        choices=("json", "console"),
        default=absent,
        help="over log.format (default: by whether it is a terminal)",
    )
    told.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=absent,
        help="over log.level (default: info)",
    )


def _vmi(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name or name in (".", "..") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAMESPACE/NAME")
    return namespace, name


def _duration(text: str) -> Seconds:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError("must be longer than 0")
    return seconds


def _instant(text: str) -> Instant:
    instant = parse_instant(text)
    if instant is None:
        raise argparse.ArgumentTypeError(
            f"expected an instant such as 2026-01-05T10:00:00Z, got {text!r}"
        )
    return instant


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return value


def _vms(text: str) -> int:
    value = _count(text)
    if value > MOST_VMS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at most {MOST_VMS:,}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, more than 0")
    return value


def _days(text: str) -> float:
    value = _positive(text)
    if value > MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {MOST_DAYS:,} days")
    return value
