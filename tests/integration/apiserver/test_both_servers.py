"""What `tests/program` shows with the simulated API server, with a real kube-apiserver and etcd.

The imported tests get this folder's `stage`.
"""

import subprocess
import time
from pathlib import Path

from tests.cluster import VMIS, find_binary, vmi
from tests.program.test_other_names import (
    test_serves_verdicts_evacuations_and_commands,
)
from tests.program.test_program import (
    test_a_migration_from_request_to_cooldown,
    test_outlives_a_restart_and_a_compaction_of_the_server,
    test_runs_on_list_and_watch_of_vmis_alone,
    test_takes_the_kubeconfig_of_the_environment,
)
from tests.program.test_recorder import (
    test_ends_by_itself_when_its_time_is_over,
    test_what_a_cluster_says_is_in_the_file,
    test_what_may_not_be_seen_is_said_once,
    test_what_was_missed_is_in_the_file_after_a_new_list,
)
from tests.program.test_sequences import Prove, play_all
from tests.program.test_watch import TestOnBothServers
from tests.support.api_servers import RealStage
from tests.support.builders import rfc3339
from tests.support.program import program


__all__ = [
    "TestOnBothServers",
    "test_a_migration_from_request_to_cooldown",
    "test_ends_by_itself_when_its_time_is_over",
    "test_outlives_a_restart_and_a_compaction_of_the_server",
    "test_runs_on_list_and_watch_of_vmis_alone",
    "test_serves_verdicts_evacuations_and_commands",
    "test_takes_the_kubeconfig_of_the_environment",
    "test_what_a_cluster_says_is_in_the_file",
    "test_what_may_not_be_seen_is_said_once",
    "test_what_was_missed_is_in_the_file_after_a_new_list",
]

SEQUENCES = 5


async def test_verdicts_after_faults_equal_an_undisturbed_runs_on_the_real_server(
    real: RealStage, prove: Prove
) -> None:
    """On the real server verdicts are right after cuts, compactions and restarts."""
    met = await play_all(real, range(SEQUENCES))
    prove(f"sequences: {SEQUENCES} on the real server, no verdict differs; faults {met}")


async def test_logs_in_with_a_client_certificate(real: RealStage, tmp_path: Path) -> None:
    """The exporter can log in with a client certificate."""
    login = real.cluster.kubeconfig(real.cluster.certified_exporter)
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        await exporter.ready()
        assert await exporter.end() == 0


async def test_a_live_scrape_passes_promtool(real: RealStage, tmp_path: Path) -> None:
    """`promtool check metrics` accepts a scrape of the running exporter."""
    namespace = await real.make_namespace()
    now = int(time.time())
    state = {"startTimestamp": rfc3339(now - 100), "endTimestamp": rfc3339(now - 40)}
    await real.admin.create(VMIS, vmi("a", namespace, status={"migrationState": state}))
    async with program(tmp_path, "--kubeconfig", str(real.login.kubeconfig)) as exporter:
        await exporter.ready()
        await exporter.verdict(namespace, "a")
        text = await exporter.until("/metrics", lambda status, _: status == 200)
    linted = subprocess.run(
        [find_binary("promtool"), "check", "metrics"],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )

    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")
