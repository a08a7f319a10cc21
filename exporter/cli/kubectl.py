"""`kubectl evictions`: runs a command such as `explain` in the exporter's own pod.

kubectl finds a plugin by the name of its program, kubectl-evictions, on the PATH. The plugin calls
kubectl again, which has the user's login: once to find the pod, and once to run the command there.
So the answer comes from the exporter's own version, and the query API stays unreachable from
outside the pod. This module needs only the standard library, because Krew installs it alone.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


SELECTOR = "app.kubernetes.io/name=kubevirt-eviction-exporter"
COMMANDS = ("explain", "status", "node", "runbook")
_USAGE = """kubectl evictions [OPTIONS] COMMAND

examples:
  kubectl evictions explain shop/db1
  kubectl evictions status
  kubectl evictions node node-1 --watch"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Become kubectl, which runs the command in the pod; exits with 1 if there is no pod."""
    parser = argparse.ArgumentParser(usage=_USAGE, allow_abbrev=False)
    parser.add_argument("--context", help="the context of the kubeconfig")
    parser.add_argument("--kubeconfig", help="the kubeconfig file")
    parser.add_argument(
        "--exporter-namespace",
        metavar="NAME",
        help="where the exporter runs (default: it is searched for in all namespaces)",
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    chosen = {"context": given.context, "kubeconfig": given.kubeconfig}
    kubectl = ["kubectl", *(f"--{option}={value}" for option, value in chosen.items() if value)]
    try:
        pod = find_pod(kubectl, given.exporter_namespace)
    except LookupError as error:
        sys.exit(f"kubectl evictions: {error.args[0]}")
    terminal = ["-it"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    place = ["-n", pod["metadata"]["namespace"], pod["metadata"]["name"], "-c", "exporter"]
    program = ["--", "python", "-m", "exporter", given.command, *given.rest]
    os.execvp("kubectl", [*kubectl, "exec", *terminal, *place, *program])  # noqa: S606, S607


def find_pod(kubectl: list[str], namespace: str | None) -> dict[str, Any]:
    """A pod of the exporter, if possible a ready one. Raises LookupError with a sentence."""
    where = ["--namespace", namespace] if namespace else ["--all-namespaces"]
    command = [*kubectl, "get", "pods", *where, "--selector", SELECTOR, "--output", "json"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    except OSError as error:
        raise LookupError(f"kubectl cannot be run: {error}") from error
    if done.returncode:
        hint = ""
        if "(Forbidden)" in done.stderr:
            hint = "; docs/operate.md has the role that is needed"
            hint += "" if namespace else " (with --exporter-namespace, in one namespace only)"
        raise LookupError(f"the exporter's pods cannot be listed: {done.stderr.strip()}{hint}")
    pods = json.loads(done.stdout)["items"]
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    if not running:
        pods_found = f"{len(pods)} pods, none of them is running" if pods else "no pod"
        if len(pods) == 1:
            pods_found = "1 pod, which is not running"
        raise LookupError(f"found {pods_found} with the label {SELECTOR}")
    return max(running, key=_is_ready)


def _is_ready(pod: dict[str, Any]) -> bool:
    if "deletionTimestamp" in pod["metadata"]:  # It may end before the command does.
        return False
    conditions = pod["status"].get("conditions", [])
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


if __name__ == "__main__":
    main()
