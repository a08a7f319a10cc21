"""`kubectl evictions` runs a command in the exporter's pod by calling kubectl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


POD = {"metadata": {"name": "starting", "namespace": "virt"}, "status": {"phase": "Running"}}
READY = {
    "metadata": {"name": "ready", "namespace": "virt"},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}
LEAVING = READY | {
    "metadata": {"name": "old", "namespace": "virt", "deletionTimestamp": "2026-11-26T12:00:00Z"}
}
PENDING = POD | {"status": {"phase": "Pending"}}
KUBECTL = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
if "get" in sys.argv:
    print({listed!r})
    if {code}:
        print("Error from server (Forbidden): pods is forbidden", file=sys.stderr)
    sys.exit({code})
print("answer")
sys.exit(12)
"""


def call(
    folder: Path, *arguments: str, pods: list[object], code: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the plugin with a kubectl that lists these pods; returns also how kubectl was called."""
    program, log = folder / "kubectl", folder / "log"
    listed = json.dumps({"items": pods})
    program.write_text(
        KUBECTL.format(python=sys.executable, log=str(log), listed=listed, code=code)
    )
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "exporter.cli.kubectl", *arguments],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": str(folder)},
    )
    calls = log.read_text().splitlines() if log.exists() else []
    return done, [json.loads(line) for line in calls]


def test_the_command_runs_in_a_ready_pod_with_the_user_s_login(tmp_path: Path) -> None:
    """Context, command and arguments reach kubectl, and its exit code is the plugin's."""
    asked = ("--context", "prod", "node", "node-1", "--all")
    done, calls = call(tmp_path, *asked, pods=[PENDING, LEAVING, POD, READY])

    selector = "app.kubernetes.io/name=kubevirt-eviction-exporter"
    assert calls == [
        f"--context=prod get pods --all-namespaces --selector {selector} --output json".split(),
        [
            "--context=prod",
            "exec",
            "-n",
            "virt",
            "ready",
            "-c",
            "exporter",
            "--",
            "python",
            "-m",
            "exporter",
            "node",
            "node-1",
            "--all",
        ],
    ]
    assert (done.stdout, done.returncode) == ("answer\n", 12)


def test_a_pod_that_is_not_ready_is_better_than_none(tmp_path: Path) -> None:
    """Before an exporter is ready, `status` says what it waits for."""
    done, calls = call(tmp_path, "--exporter-namespace", "virt", "status", pods=[POD])

    assert calls[0][1:4] == ["pods", "--namespace", "virt"]
    assert "starting" in calls[1]
    assert done.returncode == 12


@pytest.mark.parametrize(
    ("pods", "code", "text"),
    [
        ([], 0, "found no pod with the label"),
        ([PENDING, PENDING], 0, "found 2 pods, none of them is running"),
        ([PENDING], 0, "found 1 pod, which is not running"),
        ([], 1, "is forbidden; docs/operate.md has the role that is needed (with"),
    ],
)
def test_why_there_is_no_answer(pods: list[object], code: int, text: str, tmp_path: Path) -> None:
    """Without a pod, the plugin says what it looked for, and exits with 1."""
    done, calls = call(tmp_path, "status", pods=pods, code=code)

    assert text in done.stderr
    assert (len(calls), done.returncode) == (1, 1)


def test_without_kubectl(tmp_path: Path) -> None:
    """Without kubectl on the PATH the plugin says so."""
    program = [sys.executable, "-m", "exporter.cli.kubectl", "status"]
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(program, check=False, capture_output=True, text=True, env=environment)

    assert "kubectl cannot be run" in done.stderr
    assert done.returncode == 1
