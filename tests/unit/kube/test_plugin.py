"""How a login plugin runs: its limits, its words, its terminal and its children."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from exporter.kube import plugin
from exporter.kube.account import Plugin
from exporter.kube.kubeconfig import Exec, NoCredentials, Variable
from exporter.kube.plugin import Credential, PluginRun
from tests.program.waiting import wait_until


VERSION = "client.authentication.k8s.io/v1"
ANSWER = json.dumps(
    {"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": "plugged"}}
)


async def run(script: str, mode: str = "Never", command: str = "sh") -> Credential:
    """Run a script as a plugin."""
    call = Exec(
        api_version=VERSION,
        command=command,
        args=["-c", script],
        env=[Variable(name="ANSWER", value=ANSWER)],
        install_hint="brew install it",
        interactive_mode=mode,
    )
    described = Plugin(where="config: user 'me'", exec=call, cluster=None)
    return await PluginRun(described, os.environ).run()


async def test_what_it_says_is_shown_as_it_comes() -> None:
    """A person sees the code to enter while the plugin waits, also without a line break."""
    with capture_logs() as logs:
        login = asyncio.create_task(run('printf "enter CODE-1" >&2; sleep 60'))

        await wait_until(
            lambda: any("CODE-1" in str(log.get("line")) for log in logs), what="the code"
        )
        login.cancel()
        await asyncio.gather(login, return_exceptions=True)
    shown = next(log for log in logs if log["event"] == "login_plugin_said")
    assert shown["plugin"] == "sh"
    assert shown["line"] == "enter CODE-1"


async def test_a_person_gets_more_time_than_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is silent ends at the first limit, one that asks a person at the second."""
    monkeypatch.setattr(plugin, "LOGIN_TIMEOUT", 0.5)
    monkeypatch.setattr(plugin, "FIRST_WORD", 0.1)
    with capture_logs() as logs:
        with pytest.raises(TimeoutError, match=r"the login plugin sh took more than 0.5 s"):
            await run("sleep 60")
        credential = await run('echo "open a browser" >&2; sleep 1; echo "$ANSWER"')
    assert credential.token == "plugged"
    waits = [log for log in logs if log["event"] == "login_waits"]
    assert [(log["plugin"], log["at_most_seconds"]) for log in waits] == [
        ("sh", 0.5),
        ("sh", plugin.PERSON_TIMEOUT),
    ]
    monkeypatch.setattr(plugin, "PERSON_TIMEOUT", 0.5)
    with pytest.raises(TimeoutError, match=r"took more than 0.5 s"):
        await run('echo "open a browser" >&2; sleep 60')


def test_the_first_word_comes_within_five_seconds() -> None:
    """A person who looks at the log knows soon what it waits for."""
    assert plugin.FIRST_WORD < 5.0 < plugin.LOGIN_TIMEOUT
    assert plugin.PERSON_TIMEOUT >= 120.0


@pytest.mark.parametrize("stream", ["2>/dev/null", ">/dev/null", ""])
async def test_a_child_that_goes_on_is_not_waited_for(stream: str) -> None:
    """A child of the plugin that keeps its outputs open does not delay the login."""
    began = time.monotonic()
    credential = await run(f'echo "$ANSWER"; sleep 20 {stream} &')
    assert credential.token == "plugged"
    assert time.monotonic() - began < 15.0


async def test_it_ends_with_the_login(tmp_path: Path) -> None:
    """If a login is cancelled, the plugin and its children end."""
    pids = tmp_path / "pids"
    login = asyncio.create_task(run(f"sleep 60 & echo $! $$ > {pids}; wait"))

    await wait_until(
        lambda: pids.exists() and len(pids.read_text().split()) == 2, what="the plugin"
    )
    login.cancel()
    await asyncio.gather(login, return_exceptions=True)
    await wait_until(
        lambda: all(_has_ended(pid) for pid in pids.read_text().split()),
        what="the end of the plugin and its child",
    )


def _has_ended(pid: str) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


async def test_a_hint_how_to_install_it() -> None:
    """If there is no such program, the message has the kubeconfig's installHint."""
    with pytest.raises(NoCredentials, match=r"no-such-plugin not found; .*: brew install it"):
        await run("", command="no-such-plugin")


async def test_without_a_terminal() -> None:
    """A plugin that needs a terminal is refused without one; others read nothing."""
    with pytest.raises(NoCredentials, match=r"exec.interactiveMode is Always: expected a terminal"):
        await run("", mode="Always")
    script = 'test -z "$(cat)" && echo "$KUBERNETES_EXEC_INFO" | grep -q interactive..false'
    assert (await run(f'{script} && echo "$ANSWER"', mode="IfAvailable")).token == "plugged"


@pytest.mark.parametrize(("mode", "interactive"), [("IfAvailable", True), ("Never", False)])
async def test_with_a_terminal(
    monkeypatch: pytest.MonkeyPatch, mode: str, *, interactive: bool
) -> None:
    """Only a plugin that may ask a person gets the terminal, and `interactive: true`."""
    ours, theirs = os.openpty()
    saved = os.dup(0)
    os.dup2(theirs, 0)
    try:
        with os.fdopen(theirs, "r", closefd=True) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            os.write(ours, b"secret\n")
            word = f"interactive..{str(interactive).lower()}"
            read = 'read -r line; test "$line" = secret' if interactive else 'test -z "$(cat)"'
            script = f'{read} && echo "$KUBERNETES_EXEC_INFO" | grep -q {word} && echo "$ANSWER"'
            assert (await run(script, mode=mode)).token == "plugged"
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(ours)
