"""The processes that are compared, and what Linux reports about them."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml

from tests.cluster.users import open_kubeconfig


ROOT = Path(__file__).parents[2]
TOOLS = ("bench-load", "bench-informer")
_TICK = os.sysconf("SC_CLK_TCK")


def build_tools() -> None:
    """Build the two Go programs, unless they are there."""
    subprocess.run([ROOT / "tests/tools/build", *TOOLS], check=True, stdout=subprocess.DEVNULL)


def tool(name: str) -> str:
    """The path of one of the two programs."""
    return str(ROOT / ".tools/bin" / name)


class Running:
    """A started process whose output is read."""

    def __init__(self, *command: str, log: Path | None = None) -> None:
        self.started = time.perf_counter()
        self._log = None if log is None else log.open("wb")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            # A login without a CA file reads all CAs of the system, which takes 17 ms. Against a
            # real API server it reads the cluster's CA.
            env={**os.environ, "SSL_CERT_FILE": os.devnull},
            stdin=subprocess.PIPE,
            stdout=self._log or subprocess.PIPE,
            stderr=self._log,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._log is not None:
            self._log.close()

    @property
    def age(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self.started

    def line(self) -> dict[str, Any]:
        """The next line of JSON that the process prints."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        fact: dict[str, Any] = json.loads(text)
        return fact

    def ask(self, line: str) -> dict[str, Any]:
        """Send the process a line, and read its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self.line()

    def move_to(self, core: int) -> None:
        """Run a process that has not started threads yet on this core alone."""
        os.sched_setaffinity(self._process.pid, {core})

    def give_way(self) -> None:
        """Run each thread of a process only while no other process wants its core."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def cpu(self) -> float:
        """The CPU seconds of the process, in user and in kernel mode."""
        stat = self._proc("stat").rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / _TICK

    def status(self, field: str) -> int:
        """A number from `/proc/PID/status`; a size in kB is converted to bytes."""
        for line in self._proc("status").splitlines():
            if line.startswith(f"{field}:"):
                words = line.split()[1:]
                return int(words[0]) * (1024 if words[-1] == "kB" else 1)
        raise KeyError(field)

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self._process.pid}/{name}").read_text(encoding="utf-8")


@contextmanager
def spared_core() -> Iterator[int]:
    """Keep this process, and those that it starts, off the last core, and yield that core."""
    cores = os.sched_getaffinity(0)
    spared = max(cores)
    os.sched_setaffinity(0, cores - {spared} or cores)
    try:
        yield spared
    finally:
        os.sched_setaffinity(0, cores)


def exchange(
    where: str, method: str, path: str, body: bytes | None = None, timeout: float = 60
) -> tuple[bytes, http.client.HTTPResponse]:
    """Send a request on a new connection; returns the body and the head of the answer."""
    connection = http.client.HTTPConnection(where, timeout=timeout)
    connection.request(method, path, body)
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    return read, answer


class Load(Running):
    """`bench-load serve`: the API server of the benchmark.

    One of `managed` VMIs and VMIMs has `managedFields`.
    """

    def __init__(
        self,
        *,
        vmis: int,
        each: int = 3,
        cooling: int = 100,
        nodes: int = 0,
        heartbeat: float = 10,
        managed: int = 3,
    ) -> None:
        super().__init__(
            tool("bench-load"), "serve",
            *("--vmis", str(vmis), "--vmims-each", str(each), "--cooling", str(cooling)),
            *("--nodes", str(nodes), "--heartbeat", f"{heartbeat:g}s", "--managed", str(managed)),
        )  # fmt: skip
        started = self.line()
        self.url: str = started["url"]
        self.sizes: dict[str, int] = started["bytes"]

    @property
    def address(self) -> str:
        """Host and port."""
        return self.url.removeprefix("http://")

    def post(self, path: str, timeout: float = 600) -> dict[str, Any]:
        """Send the load server a command; returns its answer."""
        body, _ = exchange(self.address, "POST", path, timeout=timeout)
        answer: dict[str, Any] = json.loads(body)
        return answer


class Exporter(Running):
    """`python -m exporter` watching a server, on TCP and on a unix socket."""

    def __init__(
        self,
        load: Load,
        directory: Path,
        *,
        history: bool = False,
        program: str = "exporter",
        policy: dict[str, Any] | None = None,
    ) -> None:
        self.socket = directory / f"query-{time.monotonic_ns()}.sock"
        number = time.monotonic_ns()
        config = directory / f"exporter-{number}.yaml"
        kubeconfig = directory / f"kubeconfig-{number}.yaml"
        self._log_file = directory / f"exporter-{number}.jsonl"
        listen = {"query": ["127.0.0.1:0", f"unix:{self.socket}"], "metrics": "127.0.0.1:0"}
        limits = {"connections": 20_000}
        # The load sends one list at a time, and a slow machine reads 100,000 VMIs in 30 s.
        kube = {"syncTimeout": "2m"}
        settings: dict[str, Any] = {"listen": listen, "limits": limits, "kube": kube}
        if policy is not None:
            settings["policy"] = policy
        if history:
            settings["history"] = f"file:{directory / f'history-{number}'}"
        config.write_text(yaml.safe_dump(settings))
        open_kubeconfig(kubeconfig, load.url)
        super().__init__(
            sys.executable, "-m", program, "--config", str(config),
            "--kubeconfig", str(kubeconfig), "--log-format", "json",
            log=self._log_file,
        )  # fmt: skip
        self.query = self.metrics = ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """The exporter's log lines with this event name."""
        lines = self._log_file.read_text(encoding="utf-8").splitlines()
        lines_read = [
            json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")
        ]
        return [line for line in lines_read if line["event"] == name]

    def log_size(self) -> tuple[int, int]:
        """How many lines and bytes the exporter has logged."""
        log = self._log_file.read_bytes()
        return log.count(b"\n"), len(log)

    def until_ready(self, within: float = 120.0) -> float:
        """Wait until the exporter is ready; returns the seconds since its start."""
        while not self.query:
            for started in self.events("started"):
                self.query = started["query"][0].removeprefix("http://")
                self.metrics = started["metrics"][0].removeprefix("http://")
            self._pause(within)
        connection = http.client.HTTPConnection(self.query, timeout=60)
        while True:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                connection.close()
                return self.age
            self._pause(within)

    def get(self, path: str, *, metrics: bool = False) -> tuple[bytes, http.client.HTTPMessage]:
        """The body and the headers of a GET that is answered with 200."""
        where = self.metrics if metrics else self.query
        body, answer = exchange(where, "GET", path)
        assert answer.status == 200, body
        return body, answer.headers

    def verdict(self, body: bytes) -> bytes:
        """The answer to one POST of candidates."""
        return exchange(self.query, "POST", "/v1/verdicts", body)[0]

    def _pause(self, within: float) -> None:
        if self.age > within or self.is_gone():
            log = self._log_file.read_text(encoding="utf-8")
            raise RuntimeError(f"not ready after {self.age:.0f} s:\n{log[-4000:]}")
        time.sleep(0.01)


class Informer(Running):
    """`bench-informer`: client-go's dynamic informers, synced when the constructor returns."""

    def __init__(self, load: Load, *resources: str) -> None:
        super().__init__(
            tool("bench-informer"), "--url", load.url, "--resources", ",".join(resources)
        )
        self.synced_within: float = self.line()["seconds"]
        self.ready_after = self.age

    def heap(self) -> int:
        """The bytes of the heap that are in use after a garbage collection."""
        heap: int = self.ask("heap")["heap"]
        return heap

    def updates(self) -> int:
        """How many events the informers' handlers have received."""
        updated: int = self.ask("count")["updated"]
        return updated


def run_tool(*arguments: str) -> list[dict[str, Any]]:
    """Run one of bench-load's clients; returns the lines that it prints."""
    done = subprocess.run(
        [tool("bench-load"), *arguments], check=True, stdout=subprocess.PIPE, cwd=ROOT
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_subject(name: str, *arguments: str) -> dict[str, Any]:
    """Run a subject of `tests/bench/subjects.py` in its own process; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.subjects", name, *arguments],
        check=True, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    fact: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fact


@contextmanager
def bare_server(directory: Path, length: int) -> Iterator[tuple[Running, str, str]]:
    """Run the bare aiohttp handler; yields the process, its TCP address and its unix socket."""
    socket = directory / f"bare-{time.monotonic_ns()}.sock"
    arguments = ("bare", str(socket), str(length))
    with Running(sys.executable, "-m", "tests.bench.subjects", *arguments) as bare:
        yield bare, bare.line()["address"], f"unix:{socket}"
