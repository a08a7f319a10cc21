"""The commands, and their exit codes."""

import asyncio
import fcntl
import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from exporter.cli.arguments import parse
from exporter.cli.check import check
from exporter.cli.commands import read_settings_for, write_recording
from exporter.engine.facts.states import State
from exporter.errors import Exit
from exporter.kube.kubeconfig import NoCredentials
from exporter.runbooks import read_runbook
from exporter.server.apps import make_query_app
from exporter.whatif import recording
from exporter.whatif.recording import CannotRecord, Kind
from tests.cluster import PATIENCE
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.builders import NOW, a_vmi, a_vmim
from tests.support.commands import run_command
from tests.support.replaying import read_file
from tests.support.serving import serving
from tests.unit.cli.test_client import ASKED, answering, refusing
from tests.unit.cli.test_drain import drain_of
from tests.unit.cli.test_replay import a_recording
from tests.unit.engine.store.test_node_drains import a_drain
from tests.unit.server.api.test_handlers import ServedApi


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m exporter` with these arguments until it ends."""
    return subprocess.run(
        [sys.executable, "-m", "exporter", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def written(directory: Path, text: str) -> Path:
    """Write a configuration file."""
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_fault_is_told_with_its_path(tmp_path: Path) -> None:
    """`check` of an invalid file exits with 2 and prints one line per error."""
    path = written(tmp_path, "listen: {query: nowhere}\nnonsense: 1\n")
    done = run("check", "--config", str(path))

    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["listen.query", "nonsense"]
    assert "Traceback" not in done.stderr


def test_remarks_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` prints remarks on a valid file."""
    path = written(tmp_path, "policy: {migrationCooldown: 0, migrationHistoryWindow: 24h}")

    assert check(path) is Exit.OK
    out = capsys.readouterr().out
    assert "policy.migrationCooldown: 0 means no minimum" in out
    assert "policy.migrationHistoryWindow: 24h" in out


@pytest.mark.parametrize(
    ("arguments", "format_", "level"),
    [
        pytest.param([], "console", "debug", id="the-file-s"),
        pytest.param(["--log-level", "error"], "console", "error", id="level"),
        pytest.param(["--log-format", "json"], "json", "debug", id="format"),
        pytest.param(["--log-level", "error", "demo"], "console", "error", id="before-demo"),
        pytest.param(["demo", "--log-level", "error"], "console", "error", id="after-demo"),
    ],
)
def test_flags_go_before_the_file(
    tmp_path: Path, arguments: list[str], format_: str, level: str
) -> None:
    """The log flags override the configuration file."""
    path = written(tmp_path, "log: {format: console, level: debug}")
    settings = read_settings_for(parse(["--config", str(path), *arguments]))

    assert (settings.log.format, settings.log.level) == (format_, level)


OVERRIDES = """
policy:
  overrides:
    - {name: dbs, match: {namespaces: ["db-*"]}, migrationCooldown: 1h}
    - {name: gold, match: {namespaces: [shop], vmiLabels: {tier: gold}}, block: true}
"""


@pytest.mark.parametrize(
    ("vmi", "text"),
    [
        pytest.param(
            ("db-1", "pg"), "the entry dbs of policy.overrides: migrationCooldown 1h,", id="entry"
        ),
        pytest.param(
            ("web", "a"), "no entry of policy.overrides: migrationCooldown 15m,", id="default"
        ),
    ],
)
def test_which_policy_a_vm_gets_by_its_namespace(
    tmp_path: Path, vmi: tuple[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check --explain` needs no cluster if the namespace decides about the policy."""
    path = written(tmp_path, OVERRIDES)

    assert check(path, vmi, tmp_path / "no-kubeconfig") is Exit.OK
    assert f"{'/'.join(vmi)}: {text}" in capsys.readouterr().out


def test_a_vm_whose_labels_decide_has_to_be_read(tmp_path: Path) -> None:
    """If labels decide, `check --explain` without credentials says that it must read the VM."""
    path = written(tmp_path, OVERRIDES)
    text = (
        "shop/a: its labels or priority class decide which entry applies, but the VMI cannot be"
        " read:"
    )

    with pytest.raises(NoCredentials, match=f"^{text}"):
        check(path, ("shop", "a"), tmp_path / "no-kubeconfig")


def imported(*arguments: str) -> set[str]:
    """The modules that a command has imported."""
    code = (
        "import sys\n"
        "from exporter.__main__ import main\n"
        f"sys.argv = ['exporter', *{arguments!r}]\n"
        "main()\n"
        "print('\\n' + ','.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return set(done.stderr.splitlines()[-1].split(","))


@pytest.mark.parametrize(
    ("arguments", "needed", "spared"),
    [
        pytest.param(
            ("explain", "--url", "unix:/nothing", "shop/db1"),
            {"exporter.cli.client", "exporter.cli.layout"},
            {"prometheus_client", "structlog", "exporter.demo", "exporter.app"},
            id="explain",
        ),
        pytest.param(
            ("check", "--config", "/dev/null"),
            {"exporter.settings"},
            {"rich", "aiohttp", "structlog", "exporter.demo", "exporter.app"},
            id="check",
        ),
        pytest.param(
            ("replay", "/dev/null"),
            {"exporter.whatif.replay", "rich"},
            {"aiohttp", "structlog", "exporter.demo", "exporter.kube.client"},
            id="replay",
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(
    arguments: tuple[str, ...], needed: set[str], spared: set[str]
) -> None:
    """A command imports only the libraries that it needs."""
    modules = imported(*arguments)

    assert needed <= modules
    assert not spared & modules


@pytest.fixture
async def exporter() -> AsyncIterator[str]:
    """The URL of a query listener; db1 cools down, and db2 is being evacuated."""
    api = ServedApi()
    api.cool()
    api.store.put(a_vmi(name="db2", uid="u2", evacuation_node="n1", migratable=True))
    api.store.put(
        a_vmim(vmi_name="db2", name="e1", uid="e1", evacuates="n1", wait_reason=State.QUOTA)
    )
    async with serving(make_query_app(api.service)) as url:
        yield url


async def test_explain_finds_the_namespace_of_a_name() -> None:
    """`explain` of a name finds its VMI, also on no node, or lists the namespaces that have one."""
    api = ServedApi()
    api.cool()
    api.store.put(a_vmi(name="pending", uid="4", node=""))
    api.store.put(a_vmi(name="db2", uid="2", node="n2"))
    api.store.put(a_vmi(name="db2", uid="3", namespace="bank", node="n3"))
    async with serving(make_query_app(api.service)) as url:
        only = await run_command("explain", "--url", url, "db1")
        waiting = await run_command("explain", "--url", url, "pending")
        several = await run_command("explain", "--url", url, "db2")

    assert (only[0], only[2]) == (Exit.OK, "")
    assert only[1].startswith("shop/db1 may not be moved now: it is cooling down")
    assert (waiting[0], waiting[2]) == (Exit.OK, "")
    assert waiting[1].startswith("shop/pending ")
    assert several == (
        Exit.NO_SUCH_VMI,
        "",
        "2 namespaces have a VMI 'db2', choose one: bank/db2, shop/db2\n",
    )


async def test_json_is_the_api_s_own(exporter: str) -> None:
    """`--json` prints the API's answers; `status --json` prints three answers."""
    _, vmi, _ = await run_command("explain", "--json", "--url", exporter, "shop/db1")
    _, status, _ = await run_command("status", "--json", "--url", exporter)

    assert json.loads(vmi)["verdicts"]["preEviction"]["reason"] == "cooldown"
    assert json.loads(status)["status"]["vmis"]["known"] == 2
    assert json.loads(status)["evacuations"]["evacuations"][0]["name"] == "db2"
    assert json.loads(status)["blocked"]["blocked"][0]["name"] == "db1"


async def test_runbook_prints_a_runbook_or_one_step() -> None:
    """`runbook` prints the Markdown; an unknown name ends with 2 and the names that there are."""
    whole = await run_command("runbook", "KubeVirtEvacuationStuck")
    code, step, _ = await run_command("runbook", "KubeVirtEvacuationStuck#quota")
    unknown, nothing, errors = await run_command("runbook", "Unknown")

    assert whole == (Exit.OK, read_runbook("KubeVirtEvacuationStuck"), "")
    assert (code, step.partition("\n")[0], step in whole[1]) == (Exit.OK, "### quota", True)
    assert (unknown, nothing) == (Exit.USAGE, "")
    assert "no runbook 'Unknown', only KubeVirtDeschedulerDoesNotAsk, " in errors


@pytest.mark.parametrize(
    ("arguments", "code", "first"),
    [
        pytest.param(("n1",), Exit.OK, "n1 can be emptied.", id="can"),
        pytest.param(
            ("n2",), Exit.CANNOT_BE_EMPTIED, "n2 cannot be emptied: shop/db2", id="cannot"
        ),
        pytest.param(("n3",), Exit.DEPENDS_ON_OTHERS, "n3 depends on others", id="others"),
        pytest.param(("--json", "n2"), Exit.CANNOT_BE_EMPTIED, "{", id="json"),
        pytest.param((), Exit.OK, "2 of 3 nodes with VMs can be emptied,", id="all"),
    ],
)
async def test_node_answers(arguments: tuple[str, ...], code: Exit, first: str) -> None:
    """The exit code of `node` says whether the node can be emptied."""
    api = ServedApi()
    api.store.put(a_vmi())
    api.store.put(a_vmi(name="db2", uid="2", node="n2", eviction_strategy="LiveMigrate"))
    api.store.put(a_vmi(name="db3", uid="3", node="n3", eviction_strategy="External"))
    async with serving(make_query_app(api.service)) as url:
        done, out, err = await run_command("node", "--url", url, *arguments)

    assert (done, err) == (code, "")
    assert out.startswith(first)


async def test_status_before_the_sync_is_an_answer() -> None:
    """Before the first sync `status` answers and exits with 8; both lists are null in JSON."""
    api = ServedApi()
    api.health.watched[0].synced = False
    async with serving(make_query_app(api.service)) as url:
        code, out, err = await run_command("status", "--url", url)
        as_json, body, _ = await run_command("status", "--json", "--url", url)

    assert (code, as_json, err) == (Exit.CANNOT_ASK, Exit.CANNOT_ASK, "")
    assert out.startswith("Not ready: the exporter is waiting for virtualmachineinstances")
    assert (json.loads(body)["evacuations"], json.loads(body)["blocked"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("explain shop/db9", Exit.NO_SUCH_VMI, "no VMI 'db9'"),
        ("explain db9", Exit.NO_SUCH_VMI, "no VMI 'db9' in any namespace"),
        ("explain virt-launcher-db1-x", Exit.NO_SUCH_VMI, "that is the name of a pod"),
        ("explain a/b --url unix:/no", Exit.CANNOT_ASK, "--url URL"),
        ("explain a/b --url here:1", Exit.USAGE, "expected http://"),
        ("node n9", Exit.NO_SUCH_NODE, "no VMI is on a node 'n9'"),
        ("node --watch", Exit.USAGE, "--watch needs the NAME of a node"),
    ],
)
async def test_what_cannot_be_answered_has_its_code(
    exporter: str, arguments: str, code: Exit, text: str
) -> None:
    """Each kind of error has its exit code, and a message on standard error."""
    done, out, err = await run_command(*arguments.split(), KUBEVIRT_EVICTION_EXPORTER_URL=exporter)

    assert (done, out) == (code, "")
    assert text in err
    assert "Traceback" not in err


async def test_an_exporter_of_another_version_is_told() -> None:
    """An answer that cannot be decoded is an error that refers to `--json`.

    `--json` prints the answer unchanged.
    """

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"ready": False, "asOf": "noon"})

    app = web.Application()
    app.router.add_get("/v1/status", answer)
    app.router.add_get("/v1/nodes/n1", answer)
    async with serving(app) as url:
        code, out, err = await run_command("status", "--url", url)
        _, told, _ = await run_command("status", "--json", "--url", url)
        _, node, _ = await run_command("node", "n1", "--json", "--url", url)

    assert (code, out) == (Exit.CANNOT_ASK, "")
    assert err.endswith("--json prints it unchanged\n")
    assert json.loads(told)["status"]["asOf"] == json.loads(node)["asOf"] == "noon"


async def test_what_a_server_says_is_only_text() -> None:
    """The message of a server cannot control the terminal."""
    async with serving(refusing(500, "No", "a\x1b[2J\nb")) as url:
        _, _, err = await run_command("status", "--url", url)

    assert r"a\x1b[2J\nb" in err
    assert err.count("\n") == 1


async def test_a_closed_pipe_is_no_error(exporter: str) -> None:
    """If the reader of the output is gone, the command ends without an error."""
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter", "status", "--url", exporter),
        stdout=writer,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(writer)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE)

    assert (process.returncode, err) == (Exit.OK, b"")


def draining(*left: int) -> web.Application:
    """A server whose node n1 is drained; the last answer is repeated."""
    answers = [
        msgspec.json.encode(
            drain_of(a_drain(*(NOW - 60.0 - n for n in range(number)), remaining=2))
        )
        for number in left
    ]

    async def answer(_: web.Request) -> web.Response:
        body = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/nodes/n1", answer)
    return app


@pytest.mark.parametrize("left", [(1, 2, 3), (1,)], ids=["moves", "nothing-moves"])
async def test_a_watched_drain_ends_with_its_reader(left: tuple[int, ...]) -> None:
    """`node --watch | head -1` exits with 0 and says nothing, also if the drain does not move."""
    async with serving(draining(*left)) as url:
        command = f"{sys.executable} -m exporter node n1 --watch --url {url} | head -1"
        process = await asyncio.create_subprocess_exec(
            *("bash", "-o", "pipefail", "-c", command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE)

    assert (process.returncode, err) == (Exit.OK, b"")
    assert out.count(b"\n") == 1


async def test_a_watched_drain_as_json() -> None:
    """`node --watch --json` prints the API's answer as one line whenever the drain changes."""
    async with serving(draining(1, 1, 2)) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "exporter", "node", "n1", "--watch", "--json", "--url", url),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        lines = [await asyncio.wait_for(process.stdout.readline(), PATIENCE) for _ in range(2)]
        process.terminate()
        await process.wait()

    answers = [json.loads(line) for line in lines]
    assert [(row["node"], row["drain"]["left"]) for row in answers] == [("n1", 1), ("n1", 2)]


DEEP = b'{"a":' + b"[" * 100_000
WIDE = b'{"a":"' + b"x" * (65 * 2**20) + b'"}'


@pytest.mark.parametrize(
    ("status", "body", "headers", "text"),
    [
        pytest.param(200, DEEP, {}, "nested too deeply", id="nested"),
        pytest.param(503, DEEP, {}, "nested too deeply", id="nested-error"),
        pytest.param(200, WIDE, {}, "larger than 64 MiB", id="large"),
        pytest.param(
            200,
            gzip.compress(WIDE, 1),
            {"Content-Encoding": "gzip"},
            "larger than 64 MiB",
            id="gzip",
        ),
    ],
)
async def test_an_answer_that_is_too_much(
    status: int, body: bytes, headers: dict[str, str], text: str
) -> None:
    """An answer that is nested or larger than 64 MiB is an error in one sentence."""
    app = answering(status, body, headers=headers)
    async with serving(app) as url:
        code, out, err = await run_command("status", "--url", url)

    assert (code, out, err.count("\n")) == (Exit.CANNOT_ASK, "", 1)
    assert text in err
    assert app[ASKED][0].headers["Accept-Encoding"] == "identity"


async def test_a_terminal_gets_colours(exporter: str) -> None:
    """On a terminal the output has colours and fits the width."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter", "explain", "--url", exporter, "shop/db1"),
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(theirs)
    await asyncio.wait_for(process.wait(), 60)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        text = terminal.read(65536).decode()

    assert "\x1b[" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "shop/db1 may not be moved now" in bare
    assert max(len(line) for line in bare.splitlines()) <= 80


A_DAY = ("--from", "2026-01-05T00:00:00Z", "--to", "2026-01-06T00:00:00Z")


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """The path of a recording of one VM, which is evicted again within its cooldown."""
    path = tmp_path / "cluster.ndjson"
    path.write_bytes(a_recording())
    return str(path)


async def test_replay_answers(recorded: str) -> None:
    """The table is on standard output; the time and memory used are on standard error."""
    code, out, err = await run_command("replay", recorded, "--policy", "ours")

    assert code == Exit.OK
    assert re.search(r"Evictions requested +2\n +allowed +1 \(50%\)", out)
    assert re.fullmatch(r"replayed .* events in .* s, .* MiB at most\n", err)


@pytest.mark.parametrize(
    ("part", "command"),
    [
        ("demo", ["demo"]),
        ("demo", ["replay", "--scenario", "week-pilot"]),
        ("whatif", ["replay", "week.ndjson"]),
        ("whatif", ["record", "--output", "week.ndjson"]),
    ],
)
def test_a_command_that_the_image_lacks_says_so(part: str, command: list[str]) -> None:
    """Without the simulated cluster or the what-if, their commands end with 2 and a sentence."""
    code = f"""
import sys
sys.modules["exporter.{part}"] = None
from exporter.__main__ import main
sys.argv = ["exporter", *{command}]
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )

    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith(f"{command[0]}: not in this image")


async def test_replay_answers_machines(recorded: str) -> None:
    """`replay --json` prints JSON."""
    _, out, _ = await run_command("replay", recorded, "--json")
    policies = json.loads(out)["policies"]

    names = ["reference", "ours", "recommended", "successes", "none"]
    assert [policy["name"] for policy in policies] == names


def test_a_scenario_is_played_as_it_is_recorded(tmp_path: Path) -> None:
    """The replay of a recorded scenario gives the same answer as `replay --scenario`."""
    path = tmp_path / "week.ndjson.gz"
    scenario = ("--scenario", "week-pilot", "--days", "0.02")
    made = run("record", *scenario, "--output", str(path))

    assert made.returncode == Exit.OK
    assert re.fullmatch(rf"{path}: [\d,]+ lines, [\d,]+ bytes\n", made.stdout)
    assert run("replay", str(path)).stdout == run("replay", *scenario).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        pytest.param([], Exit.USAGE, "expected one of FILE", id="no-source"),
        pytest.param(["{}", "--scenario", "week-pilot"], Exit.USAGE, "expected one of", id="two"),
        pytest.param(["--prometheus", "http://x"], Exit.USAGE, "expected --from", id="no-range"),
        pytest.param(
            ["--prometheus", "http://x", *A_DAY, "--step", "1ms"], Exit.USAGE, "--step", id="step"
        ),
        pytest.param(["{}", "--policy", "theirs"], Exit.USAGE, "--policy theirs", id="policy"),
        pytest.param(["{}.not"], Exit.CANNOT_REPLAY, "No such file", id="no-file"),
        pytest.param(
            ["--prometheus", "http://127.0.0.1:9", *A_DAY],
            Exit.CANNOT_REPLAY,
            "127.0.0.1:9",
            id="no-prometheus",
        ),
    ],
)
async def test_what_cannot_be_played_has_its_code(
    recorded: str, arguments: list[str], code: Exit, why: str
) -> None:
    """If a replay is not possible, the exit code and standard error say why."""
    words = (argument.replace("{}", recorded) for argument in arguments)
    done, out, err = await run_command("replay", *words)

    assert (done, out) == (code, "")
    assert why in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("redirection", "why"),
    [
        pytest.param(">&-", "there is no standard output for the answer", id="closed"),
        pytest.param(">/dev/full", "standard output: No space left on device", id="full"),
    ],
)
def test_an_answer_that_cannot_be_printed_is_told(
    recorded: str, redirection: str, why: str
) -> None:
    """If the answer cannot be printed, the command fails."""
    done = subprocess.run(
        [
            *("/bin/sh", "-c", f'"$@" {redirection}', "sh"),
            *(sys.executable, "-m", "exporter", "replay", recorded, "--json"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE,
    )

    assert (done.returncode, done.stderr) == (Exit.CANNOT_REPLAY, f"{why}\n")


def test_a_recording_is_never_overwritten(recorded: str) -> None:
    """An existing recording is never overwritten."""
    scenario = ("--scenario", "week-pilot", "--days", "0.001")
    for source in (scenario, ("--kubeconfig", recorded)):
        done = run("record", "--output", recorded, *source)
        assert done.returncode == Exit.CANNOT_RECORD
        assert "exists already" in done.stdout + done.stderr

    assert Path(recorded).read_bytes() == a_recording()


def test_an_incomplete_scenario_leaves_no_file(tmp_path: Path) -> None:
    """If recording a scenario fails or is interrupted, no file is left."""
    path = tmp_path / "week.ndjson"

    def lines(end: BaseException) -> Iterator[bytes]:
        yield recording.write_header()
        raise end

    with pytest.raises(CannotRecord, match=r"^disk full$"):
        write_recording(path, lines(CannotRecord("disk full")))
    assert not path.exists()
    with pytest.raises(KeyboardInterrupt):
        write_recording(path, lines(KeyboardInterrupt()))
    assert not path.exists()


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        pytest.param(signal.SIGINT, Exit.INTERRUPTED, "stopped by Ctrl-C", id="ctrl-c"),
        pytest.param(signal.SIGTERM, Exit.TERMINATED, "stopped by SIGTERM", id="sigterm"),
    ],
)
def test_a_signal_ends_a_replay(
    tmp_path: Path, number: signal.Signals, code: Exit, message: str
) -> None:
    """SIGINT and SIGTERM end a replay without an answer, each with its own exit code."""
    pipe = tmp_path / "recording"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "exporter", "replay", str(pipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # `open` returns when the replay has opened the pipe. Then the replay waits for a line.
    with pipe.open("wb"):
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)

    assert (process.returncode, out, err) == (code, "", f"{message}\n")


def demo(
    tmp_path: Path, *arguments: str, python: tuple[str, ...] = (), out: int = subprocess.DEVNULL
) -> "subprocess.Popen[str]":
    """Start the demo as a process, with its own listeners."""
    path = written(tmp_path, "listen: {query: '127.0.0.1:0', metrics: '127.0.0.1:0'}\n")
    return subprocess.Popen(
        [sys.executable, *python, "-m", "exporter", "demo", "--config", str(path), *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("module", ["exporter.engine.facts.model", "aiohttp", "exporter.app"])
def test_ctrl_c_during_the_start_leaves_no_traceback(module: str, tmp_path: Path) -> None:
    """Ctrl-C during the start leaves no traceback."""
    with demo(tmp_path, python=("-X", "importtime")) as process:
        try:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).endswith(f" {module}\n"):
                assert line, "it ended"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()

    assert process.returncode in {Exit.INTERRUPTED, Exit.OK}
    assert "Traceback" not in err


def test_the_demo_runs_without_a_reader_of_its_greeting(tmp_path: Path) -> None:
    """The demo continues if its output is closed, as in `demo | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    process = demo(
        tmp_path, *("--vms", "12", "--log-format", "json", "--log-level", "info"), out=writer
    )
    os.close(writer)

    assert process.stderr is not None
    while '"listed"' not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == Exit.OK
    assert "Traceback" not in err


def test_a_cluster_that_cannot_be_asked_leaves_no_file(tmp_path: Path) -> None:
    """Without credentials `record` exits as the main job does, and leaves no file."""
    path = tmp_path / "cluster.ndjson"
    done = run("record", "--output", str(path), "--kubeconfig", str(tmp_path / "none"))

    assert done.returncode == Exit.NO_CREDENTIALS
    assert not path.exists()


async def test_sigterm_ends_a_recording_whole(simulated: SimulatedStage, tmp_path: Path) -> None:
    """SIGTERM ends a recording, and the file is complete."""
    path = tmp_path / "cluster.ndjson.gz"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter", "record", "--output", str(path)),
        *(
            "--kubeconfig",
            str(open_kubeconfig(tmp_path / "kubeconfig", simulated.url)),
            "--log-format",
            "json",
        ),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    lists = 0
    while lists < 4:
        line = await asyncio.wait_for(process.stderr.readline(), PATIENCE)
        assert line, "it ended"
        lists += b'"listed"' in line
    process.terminate()
    await asyncio.wait_for(process.communicate(), PATIENCE)
    events, _ = read_file(path.read_bytes())

    assert process.returncode == Exit.OK
    assert sum(event.kind is Kind.SYNCED for event in events) == 4
    assert events[-1].kind is Kind.ENDED
