"""The rows of the table, with what they measure.

Each row checks one target, and compares the exporter with an alternative if there is one. The two
take turns in one run, so that other load on the machine slows both; medians are compared. The first
round of a measurement does not count, except where the beginning itself is measured (a sync, a
start).
"""

import http.client
import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from tests.bench.processes import (
    Exporter,
    Informer,
    Load,
    Running,
    bare_server,
    run_subject,
    run_tool,
    spared_core,
    tool,
)


VMIS, VMIMS = "virtualmachineinstances", "virtualmachineinstancemigrations"
LIST = f"/apis/kubevirt.io/v1/{VMIS}?watch=1&sendInitialEvents=true"
MIB = 2**20
FIFTY_OVERRIDES = [
    {
        "name": f"size-{size}",
        "match": {"namespaces": ["team-*"], "vmiLabels": {"kubevirt.io/size": size}},
        "migrationCooldown": "20m",
    }
    for size in (*(f"large-{number}" for number in range(49)), "med*")
]
"""Every VMI of the load server matches only the last override, so all fifty are compared."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured, how often and for how long (seconds)."""

    vmis: int = 10_000
    many: int = 100_000
    repeats: int = 5
    asking: float = 3.0
    events: int = 30_000
    paced: float = 10.0
    series: int = 20_000
    waiting: int = 2_000
    held: float = 10.0
    quiet: float = 60.0
    loaded: float = 600.0
    failures: int = 10_000
    storm: float = 60.0
    nodes: int = 5_000
    steps: tuple[int, ...] = (100, 10, 3, 1)

    @property
    def cooling(self) -> int:
        """How many of 1,000 VMIs must cool down so that a scrape has `series` lines."""
        return min(1000, round(self.series / 3 / self.vmis * 1000) + 1)


SMALL = Sizes(
    vmis=200, many=400, repeats=1, asking=0.2, events=400, paced=0.5, series=300, waiting=50,
    held=0.5,
    quiet=1.0, loaded=2.0, failures=100, storm=1.0, nodes=100, steps=(10, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table. `met` is None if this machine cannot decide it."""

    what: str
    target: str
    ours: str
    theirs: str
    ratio: str
    met: bool | None


@dataclass
class Bench:
    """One run: its sizes, every number that was measured, and remarks below the table."""

    sizes: Sizes
    say: Callable[[str], None]
    raw: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)
    _directory: Path = field(init=False, repr=False)

    def run(self, only: Sequence[str] = ()) -> list[Row]:
        """Measure every row, or only the named ones."""
        rows: list[Row] = []
        self.raw["sizes"] = asdict(self.sizes)
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            self._directory = Path(directory)
            for name, measure in PARTS.items():
                if not only or name in only:
                    began = time.perf_counter()
                    self.say(f"{name} ...")
                    rows += measure(self)
                    self.say(f"{name}: {time.perf_counter() - began:.0f} s")
        return rows

    # Rows

    def sync(self) -> list[Row]:
        """The first list of the VMIs, by the exporter, by the floor and by the informer."""
        sizes = self.sizes
        walls: dict[str, list[float]] = {"ours": [], "floor": [], "informer": []}
        cpus: dict[str, list[float]] = {"ours": [], "floor": [], "informer": []}
        with Load(vmis=sizes.vmis) as load:
            sink = run_tool("sink", "--address", load.address, "--path", LIST)[0]
            for _ in range(sizes.repeats):
                for name, subject in (("ours", "sync"), ("floor", "floor")):
                    fact = run_subject(subject, load.url)
                    assert fact["objects"] == sizes.vmis, fact
                    walls[name].append(fact["wall"])
                    cpus[name].append(fact["cpu"])
                with Informer(load, VMIS) as informer:
                    walls["informer"].append(informer.synced_within)
                    cpus["informer"].append(informer.cpu())
        self.raw["sync"] = {"wall": walls, "cpu": cpus, "sink": sink, "bytes": load.sizes}
        self.notes.append(
            f"The load server is not the limit: a client that ignores the bytes receives the same"
            f" list of {sink['bytes'] / 1e6:.0f} MB in {sink['seconds']:.2f} s"
            f" (ours {median(walls['ours']):.2f} s, the floor {median(walls['floor']):.2f} s)."
            f" A VMI has {load.sizes[VMIS]} bytes, a VMIM {load.sizes[VMIMS]}."
        )
        what = f"first sync of {sizes.vmis:,} VMIs"
        return [
            compare(f"{what}, wall", "10x faster than the informer", walls["ours"],
                    walls["informer"], show_seconds, at_least=10),
            compare(f"{what}, CPU", "10x faster than the informer", cpus["ours"],
                    cpus["informer"], show_seconds, at_least=10),
            compare(f"{what}, wall", "at most 2x the floor", walls["ours"],
                    walls["floor"], show_seconds, at_most=2),
            compare(f"{what}, CPU", "at most 2x the floor", cpus["ours"],
                    cpus["floor"], show_seconds, at_most=2),
        ]  # fmt: skip

    def start(self) -> list[Row]:
        """The time from the start of the process until it is ready, and its memory at that time."""
        sizes = self.sizes
        begun = self._start("start", sizes.vmis, sizes.repeats)
        what = f"{sizes.vmis:,} VMIs + {3 * sizes.vmis:,} VMIMs"
        self.notes.append(
            f"The exporter has {self.kept['empty'] / MIB:.0f} MiB with an empty cluster; the memory"
            " per VMI is the growth of its RSS beyond this. For the informer only the live heap"
            " after a garbage collection counts."
        )
        return [
            compare(f"start to ready, {what}, wall", "4x faster than the informer",
                    *begun["wall"], show_seconds, at_least=4),
            compare(f"start to ready, {what}, CPU", "4x faster than the informer",
                    *begun["cpu"], show_seconds, at_least=4),
            compare("memory per VMI with its VMIMs", "at most 1/20 of the informer's heap",
                    *begun["per_vmi"], show_bytes, at_least=20),
            compare(f"RSS of the process, {what}", "at most 1/10 of the informer's",
                    *begun["rss"], show_mib, at_least=10),
        ]  # fmt: skip

    def managed(self) -> list[Row]:
        """The same in a larger cluster, where each VMI and VMIM has `managedFields`."""
        vmis = self.sizes.many // 2
        begun = self._start("managed", vmis, min(3, self.sizes.repeats), managed=1)
        what = f"{vmis:,} + {3 * vmis:,} with managedFields"
        return [
            compare(f"start to ready, {what}, wall", "8x faster than the informer",
                    *begun["wall"], show_seconds, at_least=8),
            compare(f"start to ready, {what}, CPU", "8x faster than the informer",
                    *begun["cpu"], show_seconds, at_least=8),
            compare(f"memory per VMI, {what}", "at most 1/45 of the informer's heap",
                    *begun["per_vmi"], show_bytes, at_least=45),
        ]  # fmt: skip

    def _start(
        self, part: str, vmis: int, repeats: int, **cluster: int
    ) -> dict[str, tuple[list[float], list[float]]]:
        """Start the exporter and the informer in turn; returns what each took."""
        begun: dict[str, tuple[list[float], list[float]]] = {
            key: ([], []) for key in ("wall", "cpu", "rss", "heap")
        }
        with Load(vmis=vmis, **cluster) as load:
            for _ in range(repeats):
                with Exporter(load, self._directory) as ours:
                    begun["wall"][0].append(ours.until_ready())
                    begun["cpu"][0].append(ours.cpu())
                    self._use(ours)
                    begun["rss"][0].append(ours.status("VmRSS"))
                with Informer(load, VMIS, VMIMS) as informer:
                    begun["wall"][1].append(informer.ready_after)
                    begun["cpu"][1].append(informer.cpu())
                    begun["rss"][1].append(informer.status("VmRSS"))
                    begun["heap"][1].append(informer.heap())
        with Load(vmis=1, each=0) as none, Exporter(none, self._directory) as ours:
            ours.until_ready()
            self._use(ours)
            empty = ours.status("VmRSS")
        with Load(vmis=1, each=0) as none, Informer(none, VMIS, VMIMS) as informer:
            empty_heap = informer.heap()
        begun["per_vmi"] = (
            [(size - empty) / vmis for size in begun["rss"][0]],
            [(heap - empty_heap) / vmis for heap in begun["heap"][1]],
        )
        self.kept["empty"] = empty
        self.raw[part] = begun | {"rss_empty": empty}
        return begun

    def scale(self) -> list[Row]:
        """Clusters of several sizes: the time until ready, the memory, scrapes and verdicts."""
        grown: dict[int, dict[str, float]] = {}
        many = self.sizes.many
        for vmis in [many // step for step in self.sizes.steps]:
            with Load(vmis=vmis) as load, Exporter(load, self._directory) as ours:
                ready, cpu = ours.until_ready(), ours.cpu()
                synced = ours.status("VmRSS")
                first, again = (_timed(lambda: self._use(ours)) for _ in range(2))
                verdict = self._ask_verdicts(ours, vmis, 1.0)
                grown[vmis] = {
                    "ready": ready, "cpu": cpu, "rss": synced, "rss_used": ours.status("VmRSS"),
                    "rss_peak": ours.status("VmHWM"), "first_scrape": first, "scrape": again,
                    "verdict": verdict["p50"],
                }  # fmt: skip
        self.raw["scale"] = grown
        empty = self.kept.get("empty", 0.0)
        small, large = many // 10, many
        costs = [(grown[n]["rss_used"] - empty) / n for n in (small, large)]
        times = [grown[n]["cpu"] / n for n in (small, large)]
        used = grown[large]["rss_used"]
        what = f"{many:,} VMIs + {3 * many:,} VMIMs"
        return [
            Row(f"{what}: RSS, synced and serving", "under 380 MiB", show_mib(used), "",
                "", used < 380 * MIB),
            Row(f"{what}: memory per VMI", f"no more than at {small:,}", show_bytes(costs[1]),
                show_bytes(costs[0]), f"{costs[1] / costs[0]:.2f}x", costs[1] <= costs[0] * 1.05),
            Row(f"{what}: CPU per VMI until ready", f"no more than at {small:,}",
                show_micro(times[1]), show_micro(times[0]), f"{times[1] / times[0]:.2f}x",
                times[1] <= times[0] * 1.05),
        ]  # fmt: skip

    def events(self) -> list[Row]:
        """Events of a watch: as fast as possible, and at a fixed rate while a caller waits."""
        sizes = self.sizes
        rates: dict[str, list[float]] = {"ours": [], "informer": []}
        with Load(vmis=sizes.vmis) as load:
            for _ in range(sizes.repeats):
                with Exporter(load, self._directory) as ours:
                    ours.until_ready()
                    time.sleep(0.5)
                    before = ours.cpu()
                    load.post(f"/bench/events?count={sizes.events}")
                    self._turned(ours, load, 5)
                    rates["ours"].append(sizes.events / max(ours.cpu() - before, 0.01))
                with Informer(load, VMIS) as informer:
                    time.sleep(0.5)
                    before, known = informer.cpu(), informer.updates()
                    load.post(f"/bench/events?count={sizes.events}")
                    while informer.updates() < known + sizes.events:
                        time.sleep(0.05)
                    rates["informer"].append(sizes.events / max(informer.cpu() - before, 0.01))
            delays: list[float] = []
            with Exporter(load, self._directory) as ours:
                ours.until_ready()
                time.sleep(0.5)
                count = int(2000 * sizes.paced)
                paced = threading.Thread(
                    target=load.post, args=(f"/bench/events?count={count}&rate=2000",)
                )
                paced.start()
                while paced.is_alive():
                    delays.append(self._turned(ours, load, 5 + 10 * (len(delays) % 20)))
                    time.sleep(0.02)
        self.raw["events"] = {"per_cpu_second": rates, "delays": delays}
        p99 = percentile(delays, 0.99)
        return [
            compare("watch events per CPU second", "no fewer than the informer", rates["ours"],
                    rates["informer"], show_count, more=True, at_least=1),
            Row("2,000 events/s: from the server's write to a changed verdict, p99",
                "under 50 ms", show_milli(p99), "", f"p50 {show_milli(median(delays))}",
                p99 < 0.05),
        ]  # fmt: skip

    def verdict(self) -> list[Row]:
        """One verdict over a persistent connection, on TCP and on a unix socket."""
        body = self._candidates(self.sizes.vmis, 1)
        with Load(vmis=self.sizes.vmis) as load, Exporter(load, self._directory) as ours:
            ours.until_ready()
            length = len(ours.verdict(Path(body).read_bytes()))
            with bare_server(self._directory, length) as (bare, tcp, unix):
                asked = self._ask_in_turn(
                    {
                        "ours": ours.query, "bare": tcp,
                        "ours_unix": f"unix:{ours.socket}", "bare_unix": unix,
                    },
                    "--path", "/v1/verdicts", "--body", body,
                    servers={"ours": ours, "bare": bare},
                )  # fmt: skip
        self.raw["verdict"] = asked
        ours_cpu, bare_cpu = ([run["server_cpu"] for run in asked[n]] for n in ("ours", "bare"))
        rows = [
            compare("one verdict, CPU", "at most 1.2x a bare aiohttp handler", ours_cpu, bare_cpu,
                    show_micro, at_most=1.2)
        ]  # fmt: skip
        for at in ("p50", "p99"):
            ours_, bare_, unix_ = (
                [run[at] for run in asked[n]] for n in ("ours", "bare", "ours_unix")
            )
            rows += [
                compare(f"one verdict, {at}", "at most 1.5x a bare aiohttp handler", ours_, bare_,
                        show_micro, at_most=1.5),
                compare(f"one verdict, {at}, unix socket", "no slower than TCP", unix_, ours_,
                        show_micro, at_most=1.0),
            ]  # fmt: skip
        return rows

    def batch(self) -> list[Row]:
        """One request with 1,000 candidates: decode, decide, encode, and send over loopback."""
        candidates = min(1000, self.sizes.vmis)
        body = self._candidates(self.sizes.vmis, candidates)
        with Load(vmis=self.sizes.vmis) as load, Exporter(load, self._directory) as ours:
            ours.until_ready()
            asked = [
                self._ask(ours.query, "--path", "/v1/verdicts", "--body", body, server=ours)
                for _ in range(self.sizes.repeats)
            ]
        self.raw["batch"] = asked
        each, cpu = (
            median([run[what] for run in asked]) / candidates for what in ("p50", "server_cpu")
        )
        return [
            Row(f"batch of {candidates:,} candidates, per candidate", "at most 2.2 us in all",
                show_micro(each), "", f"CPU {show_micro(cpu)}", each <= 2.2e-6)
        ]  # fmt: skip

    def overrides(self) -> list[Row]:
        """The cost of fifty overrides; every VMI matches only the last one."""
        vmis, candidates = self.sizes.many, min(1000, self.sizes.many)
        body = self._candidates(vmis, candidates)
        measured: dict[str, dict[str, Any]] = {}
        with Load(vmis=vmis) as load:
            for name, policy in (("none", {}), ("fifty", {"overrides": FIFTY_OVERRIDES})):
                with Exporter(load, self._directory, policy=policy) as ours:
                    ours.until_ready()
                    cpu = ours.cpu()
                    self._use(ours)
                    used = ours.status("VmRSS")
                    asked = [
                        self._ask(ours.query, "--path", "/v1/verdicts", "--body", body)["p50"]
                        for _ in range(self.sizes.repeats)
                    ]
                measured[name] = {"cpu": cpu, "rss": used, "batch": asked}
        self.raw["overrides"] = measured
        none, fifty = measured["none"], measured["fifty"]
        what = f"50 exceptions at {vmis:,} VMIs"
        each, plain = ([took / candidates for took in the["batch"]] for the in (fifty, none))
        return [
            compare(f"{what}: RSS", "at most 1.05x that without", [fifty["rss"]], [none["rss"]],
                    show_mib, at_most=1.05),
            compare(f"{what}: CPU until ready", "at most 1.2x that without", [fifty["cpu"]],
                    [none["cpu"]], show_seconds, at_most=1.2),
            compare(f"{what}: batch of {candidates:,}, per candidate",
                    "at most 1.1x that without", each, plain, show_micro, at_most=1.1),
        ]  # fmt: skip

    def scrape(self) -> list[Row]:
        """Scrapes with many per-VMI series, and how long verdicts wait during them."""
        sizes = self.sizes
        with Load(vmis=sizes.vmis, cooling=sizes.cooling) as load:
            fact = run_subject("scrape", load.url, str(sizes.repeats))
            with Exporter(load, self._directory) as ours:
                ours.until_ready()
                ours.get("/metrics", metrics=True)
                waits = []
                for _ in range(sizes.repeats):
                    stop = threading.Event()
                    often = (ours, stop, "/metrics", 0.05)
                    scraping = threading.Thread(target=_get_until, args=often)
                    scraping.start()
                    asked = self._ask_verdicts(ours, sizes.vmis, sizes.asking, pause="200us")
                    waits.append(asked["longest"])
                    stop.set()
                    scraping.join()
        self.raw["scrape"] = fact | {"waits": waits}
        rows = []
        for form in ("text", "openmetrics"):
            assert fact[f"{form}_equal"], f"{form}: not what prometheus_client writes"
            rows.append(
                compare(f"scrape with {fact['series']:,} per-VMI series, {form}, CPU",
                        "8x faster than prometheus_client's gauges", fact[form]["ours"],
                        fact[form]["theirs"], show_milli, at_least=8)
            )  # fmt: skip
        worst = max(waits)
        return [
            *rows,
            Row("longest wait of a verdict during scrapes", "under 10 ms", show_milli(worst), "",
                f"median {show_milli(median(waits))}", worst < 0.01),
        ]  # fmt: skip

    def blocked(self) -> list[Row]:
        """/v1/blocked: the rate of 304 answers, and long polls of many clients."""
        sizes = self.sizes
        with Load(vmis=sizes.vmis) as load, Exporter(load, self._directory) as ours:
            ours.until_ready()
            _, headers = ours.get("/v1/blocked")
            with bare_server(self._directory, 0) as (_, tcp, _unix):
                asked = self._ask_in_turn(
                    {"ours": ours.query, "bare": tcp},
                    *("--path", "/v1/blocked", "--status", "304"),
                    *("--header", f"If-None-Match: {headers['ETag']}"),
                )
            before = ours.status("VmRSS")
            clients = min(sizes.waiting, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
            with Running(
                *_wait_command(ours.query, clients, sizes.held + 2 * sizes.asking),
            ) as waiting:
                held = waiting.line()["held"]
                swollen = ours.status("VmRSS")
                slow = self._ask_verdicts(ours, sizes.vmis, sizes.asking)
                turned = self._turned(ours, load, 5)
                ended = waiting.line()
            alive = not ours.is_gone()
        self.raw["blocked"] = asked | {
            "waiting": ended, "rss": [before, swollen], "verdicts": slow, "turned": turned,
        }  # fmt: skip
        rates = {name: [run["per_second"] for run in asked[name]] for name in asked}
        each = (swollen - before) / max(held, 1)
        return [
            compare("/v1/blocked unchanged, 304 per second", "the bare handler's rate",
                    rates["ours"], rates["bare"], show_count, more=True, at_least=0.95),
            Row(f"{clients:,} clients wait on /v1/blocked", "all wait, none fails",
                f"{held:,} wait, {show_bytes(each)} each",
                "", f"a verdict meanwhile: p99 {show_milli(slow['p99'])}",
                alive and held == clients and ended["failed"] == 0),
        ]  # fmt: skip

    def idle(self) -> list[Row]:
        """CPU use in a minute without events."""
        quiet = self.sizes.quiet
        with Load(vmis=self.sizes.vmis) as load, Exporter(load, self._directory) as ours:
            ours.until_ready()
            time.sleep(min(2.0, quiet))
            before, woken = ours.cpu(), ours.status("voluntary_ctxt_switches")
            time.sleep(quiet)
            used = ours.cpu() - before
            wakes = (ours.status("voluntary_ctxt_switches") - woken) / quiet
        self.raw["idle"] = {"seconds": quiet, "cpu": used, "wakes_per_second": wakes}
        return [
            Row("idle: CPU per minute", "under 0.06 s", f"{used / quiet * 60:.2f} s", "", "",
                used / quiet < 0.001),
            Row("idle: wake-ups per second", "at most 1", f"{wakes:.2f}", "", "", wakes <= 1.0),
        ]  # fmt: skip

    def nodes(self) -> list[Row]:
        """Three exporters at once: without nodes, and with nodes that are written at two rates.

        A kubelet whose node does not change writes it each five minutes, and else each ten seconds
        (`nodeStatusReportFrequency` and `nodeStatusUpdateFrequency`).
        """
        vmis, nodes, quiet = self.sizes.vmis, self.sizes.nodes, self.sizes.quiet
        with (
            Load(vmis=vmis) as without, Exporter(without, self._directory) as bare,
            Load(vmis=vmis, nodes=nodes, heartbeat=300) as calm,
            Exporter(calm, self._directory) as usual,
            Load(vmis=vmis, nodes=nodes, heartbeat=10) as busy,
            Exporter(busy, self._directory) as worst,
        ):  # fmt: skip
            all_ = {"none": bare, "300": usual, "10": worst}
            for exporter in all_.values():
                exporter.until_ready()
                self._use(exporter)
            time.sleep(min(2.0, quiet))
            before = {name: exporter.cpu() for name, exporter in all_.items()}
            time.sleep(quiet)
            cpu = {n: (exporter.cpu() - before[n]) / quiet * 60 for n, exporter in all_.items()}
            rss = {name: exporter.status("VmRSS") for name, exporter in all_.items()}
            for exporter in (usual, worst):
                body, _ = exporter.get("/metrics", metrics=True)
                watched = f'kubevirt_eviction_exporter_objects{{resource="nodes"}} {nodes}.0'
                assert watched in body.decode(), watched
        self.raw["nodes"] = {"cpu": cpu, "rss": rss}
        rows = []
        for each, seconds in (("300", 1.0), ("10", 10.0)):
            what = f"{nodes:,} nodes, each written every {each} s"
            rows += [
                Row(f"{what}: CPU per minute", f"at most {seconds:g} s more than without",
                    show_seconds(cpu[each]), show_seconds(cpu["none"]), "",
                    cpu[each] - cpu["none"] <= seconds),
                Row(f"{what}: RSS", "at most 10 MiB more than without", show_mib(rss[each]),
                    show_mib(rss["none"]), "", rss[each] - rss["none"] <= 10 * MIB),
            ]  # fmt: skip
        return rows

    def pauses(self) -> list[Row]:
        """The longest wait of a verdict while everything runs at once, and its cause.

        The exporter has a core of its own, and the caller goes before the load: otherwise both
        would also wait for the scheduler. The waits are measured with the plain exporter. The
        causes come from a second run, a tenth as long, which logs what blocks the event loop
        (`tests/bench/pauses.py`). It prints ten.
        """
        sizes = self.sizes
        with spared_core() as core, Load(vmis=sizes.many) as load:
            waits, _ = self._burden(load, "exporter", core, sizes.loaded)
            pauses_lasts = max(2.0, sizes.loaded / 10)
            _, pauses = self._burden(load, "tests.bench.pauses", core, pauses_lasts)
        pauses.sort(key=lambda pause: -pause["seconds"])
        self.raw["pauses"] = {"waits": waits, "pauses": pauses[:100]}
        for pause in pauses[:10]:
            self.say(
                f"the event loop paused {show_milli(pause['seconds'])} in {pause['function']}"
                f" (CPU {show_milli(pause['cpu'])},"
                f" garbage collector {show_milli(pause['collected'])})"
            )
        return [
            Row(f"{sizes.many:,} VMIs, 2,000 events/s, scrapes, history and page for"
                f" {sizes.loaded:.0f} s: longest wait of a verdict", "under 25 ms",
                show_milli(waits["longest"]), "",
                f"p50 {show_milli(waits['p50'])}, p99.9 {show_milli(waits['p999'])}",
                waits["longest"] < 0.025),
        ]  # fmt: skip

    def storm(self) -> list[Row]:
        """The cost of the log lines of many failed migrations."""
        count, lasts = self.sizes.failures, self.sizes.storm
        with Load(vmis=self.sizes.vmis) as load, Exporter(load, self._directory) as ours:
            ours.until_ready()
            self._use(ours)
            time.sleep(1.1)  # ends have whole seconds, and an end before the start is not logged
            before, cpu = ours.log_size(), ours.cpu()
            path = f"/bench/failures?count={count}&rate={round(count / lasts)}"
            failing = threading.Thread(target=load.post, args=(path,))
            failing.start()
            waits = self._ask_verdicts(ours, self.sizes.vmis, lasts, pause="1ms")
            failing.join()
            gives_up = time.monotonic() + 30
            while len(ended := ours.events("migration_ended")) < count:
                if time.monotonic() > gives_up:
                    raise RuntimeError(f"{len(ended)} of {count} failures were logged")
                time.sleep(0.05)
            lines, size = (now - then for now, then in zip(ours.log_size(), before, strict=True))
            used = ours.cpu() - cpu
        self.raw["storm"] = {"waits": waits, "lines": lines, "bytes": size, "cpu": used}
        what = f"{count:,} failed migrations in {lasts:.0f} s"
        return [
            Row(f"{what}: longest wait of a verdict", "under 25 ms", show_milli(waits["longest"]),
                "", f"p99.9 {show_milli(waits['p999'])}", waits["longest"] < 0.025),
            Row(f"{what}: log lines per 1,000", "1,000", f"{lines / count * 1000:,.0f}",
                "", f"{show_bytes(size / count)} each",
                count == len(ended) <= lines <= 1.01 * count),
        ]  # fmt: skip

    def history(self) -> list[Row]:
        """The cost of writing the history file."""
        many = self.sizes.many
        cost = run_subject("history", str(many))
        self.raw["history"] = cost
        return [
            Row(f"the history file of {many:,} VMIs: longest callback while it is written",
                "under 25 ms", show_milli(cost["longest"]), "",
                f"{show_bytes(cost['bytes'])}, {cost['cpu']:.1f} s of CPU",
                cost["longest"] < 0.025),
        ]  # fmt: skip

    # Parts of rows

    def _burden(
        self, load: Load, program: str, core: int, lasts: float
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The waits of one caller under all kinds of load at once, and the logged pauses."""
        with Exporter(load, self._directory, history=True, program=program) as ours:
            ours.move_to(core)
            load.give_way()
            ours.until_ready()
            self._use(ours)
            known = len(ours.events("pause"))
            stop = threading.Event()
            others = [
                threading.Thread(
                    target=load.post,
                    args=(f"/bench/events?count={int(2000 * lasts)}&rate=2000", lasts + 600),
                ),
                threading.Thread(target=_get_until, args=(ours, stop, "/metrics", 15.0)),
                threading.Thread(target=_get_until, args=(ours, stop, "/", 5.0)),
            ]
            for other in others:
                other.start()
            waits = self._ask_verdicts(ours, self.sizes.many, lasts, pause="1ms")
            stop.set()
            for other in others:
                other.join()
            return waits, ours.events("pause")[known:]

    def _use(self, ours: Exporter) -> None:
        """Ask for a scrape and 1,000 verdicts, because the answers need memory, too."""
        ours.get("/metrics", metrics=True)
        vmis = min(1000, self.sizes.vmis)
        ours.verdict(Path(self._candidates(vmis, vmis)).read_bytes())

    def _candidates(self, vmis: int, count: int) -> str:
        """Write a request for this many candidates, spread over the VMIs; returns the path."""
        step = max(1, vmis // count)
        candidates = [_candidate(i * step) for i in range(count)]
        file = self._directory / f"candidates-{vmis}-{count}.json"
        file.write_text(json.dumps({"checkpoint": "preEviction", "candidates": candidates}))
        return str(file)

    def _ask_in_turn(
        self,
        targets: dict[str, str],
        *arguments: str,
        servers: Mapping[str, Running] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Call `_ask` for each target in turn; also measure the CPU of these `servers`."""
        asked: dict[str, Any] = {name: [] for name in targets}
        for _ in range(self.sizes.repeats):
            for name, address in targets.items():
                asked[name].append(self._ask(address, *arguments, server=servers.get(name)))
        return asked

    def _ask(self, address: str, *arguments: str, server: Running | None = None) -> dict[str, Any]:
        """Run the client, and return what it measured.

        `server_cpu` is the server's CPU seconds per answer.
        """
        lasts = f"{self.sizes.asking}s"
        before = 0.0 if server is None else server.cpu()
        answer = run_tool("ask", "--address", address, "--lasts", lasts, *arguments)[0]
        if server is not None:
            answer["server_cpu"] = (server.cpu() - before) / answer["asked"]
        return answer

    def _ask_verdicts(
        self, ours: Exporter, vmis: int, lasts: float, *, pause: str = ""
    ) -> dict[str, Any]:
        """Ask for verdicts one by one for `lasts` seconds; returns how long they took."""
        body = ("--path", "/v1/verdicts", "--body", self._candidates(vmis, 1))
        pauses = ("--pause", pause) if pause else ()
        return run_tool("ask", "--address", ours.query, *body, "--lasts", f"{lasts}s", *pauses)[0]

    def _turned(self, ours: Exporter, load: Load, vmi: int) -> float:
        """Begin or end a VMI's migration; returns the seconds until the verdict changes."""
        body = json.dumps({"checkpoint": "filter", "dryRun": True, "candidates": [_candidate(vmi)]})
        connection = http.client.HTTPConnection(ours.query, timeout=60)
        turn = load.post(f"/bench/turn?vmi={vmi}")
        while True:
            connection.request("POST", "/v1/verdicts", body)
            verdict = json.loads(connection.getresponse().read())["verdicts"][0]
            now = time.time()
            if (verdict["reason"] == "migration_in_progress") == turn["runs"]:
                connection.close()
                return float(now - turn["at"])
            if now - turn["at"] > 60:
                raise RuntimeError(f"VMI {vmi} has not turned: {verdict}")
            time.sleep(0.0005)


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "sync": Bench.sync,
    "start": Bench.start,
    "managed": Bench.managed,
    "scale": Bench.scale,
    "events": Bench.events,
    "verdict": Bench.verdict,
    "batch": Bench.batch,
    "overrides": Bench.overrides,
    "scrape": Bench.scrape,
    "blocked": Bench.blocked,
    "storm": Bench.storm,
    "history": Bench.history,
    "idle": Bench.idle,
    "nodes": Bench.nodes,
    "pauses": Bench.pauses,
}


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile of the values at this share (0 to 1)."""
    return sorted(values)[round(share * (len(values) - 1))]


def compare(
    what: str,
    target: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    show: Callable[[float], str],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    more: bool = False,
) -> Row:
    """Compare two medians.

    With `at_least` the ratio says how many times better the exporter is. With `at_most` the ratio
    is the exporter's median divided by the other one. With `more` a greater number is better.
    """
    first, other = median(ours), median(theirs)
    if at_most is not None:
        ratio = first / other
        met = ratio <= at_most
    else:
        assert at_least is not None
        ratio = first / other if more else other / first
        met = ratio >= at_least
    return Row(what, target, _spread(ours, show), _spread(theirs, show), f"{ratio:.2f}x", met)


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The median, and half the distance from lowest to highest value in per cent of the median."""
    middle = median(values)
    text = show(middle)
    if len(values) > 1 and middle:
        text += f" ±{(max(values) - min(values)) / 2 / middle:.0%}"
    return text


def show_seconds(value: float) -> str:
    """Write seconds."""
    return f"{value:.2f} s"


def show_milli(value: float) -> str:
    """Write seconds as milliseconds."""
    return f"{value * 1e3:.1f} ms"


def show_micro(value: float) -> str:
    """Write seconds as microseconds."""
    return f"{value * 1e6:.2f} us" if value < 1e-5 else f"{value * 1e6:.0f} us"


def show_mib(value: float) -> str:
    """Write bytes as mebibytes."""
    return f"{value / MIB:.0f} MiB"


def show_bytes(value: float) -> str:
    """Write bytes as kilobytes."""
    return f"{value / 1000:.1f} kB"


def show_count(value: float) -> str:
    """Write a number per second."""
    return f"{value:,.0f}/s"


def _candidate(vmi: int) -> dict[str, str]:
    """A VMI of the load server, as a descheduler would ask about it."""
    name = f"vm-{100_000 + vmi}"
    return {
        "namespace": f"team-{vmi % 50}",
        "name": name,
        "vmiUid": f"f{vmi:07x}-5f0e-4c1d-9a77-{vmi:012x}",
        "node": f"worker-{vmi % 100}",
        "pod": f"virt-launcher-{name}-q9q9q",
    }


def _get_until(ours: Exporter, stop: threading.Event, path: str, every: float) -> None:
    while not stop.is_set():
        ours.get(path, metrics=path == "/metrics")
        stop.wait(every)


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _wait_command(address: str, clients: int, lasts: float) -> tuple[str, ...]:
    return (
        tool("bench-load"), "wait", "--address", address, "--path", "/v1/blocked?wait=60",
        "--clients", str(clients), "--lasts", f"{lasts}s",
    )  # fmt: skip
