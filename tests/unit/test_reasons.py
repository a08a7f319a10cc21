"""Every reason that blocks, in each output that gives reasons."""

import msgspec
import pytest

from exporter.cli.explain import show_vmi
from exporter.cli.status import show_status
from exporter.engine.facts.model import Fact, KubeVirtSettings
from exporter.engine.facts.policy import Override, Reason
from exporter.server.admission.reviews import write_message
from exporter.server.api.schemas import BlockedAnswer, StatusAnswer, VmiAnswer
from exporter.words.events import write_blocked
from exporter.words.verdicts import REASONS
from tests.support.builders import NAMESPACE, NOW, a_pod, a_policy, a_running_state, a_state, a_vmi
from tests.unit.cli.answers import PIPED
from tests.unit.server.api.test_handlers import ServedApi, opened


OWN = Override(name="own", namespaces=(NAMESPACE,), policy=a_policy(block=True))
POLICIES = {
    Reason.PLATFORM_UPDATE: a_policy(guard_platform_update=True),
    Reason.POLICY: a_policy(overrides=(OWN,)),
}
FACTS: dict[Reason, tuple[Fact, ...]] = {
    Reason.MIGRATION_IN_PROGRESS: (a_vmi(migration=a_running_state()),),
    Reason.EVACUATION_IN_PROGRESS: (a_vmi(evacuation_node="n1"), a_pod()),
    Reason.PLATFORM_UPDATE: (a_vmi(), KubeVirtSettings(updating=True)),
    Reason.POLICY: (a_vmi(override="own"),),
    Reason.COOLDOWN: (a_vmi(migration=a_state()),),
}


@pytest.mark.parametrize("reason", Reason)
async def test_every_surface_gives_the_reason(reason: Reason) -> None:
    """The API, the metrics, the pages, the commands and the webhook give the same reason."""
    async with opened(ServedApi(policy=POLICIES.get(reason, a_policy()))) as api:
        for fact in FACTS[reason]:
            api.store.put(fact)
        # Before a verdict about the VM, which keeps an idle VM in the view.
        blocked = await api.get("/v1/blocked")
        verdict = await api.verdict()
        explained = await api.get(f"/v1/vmis/{NAMESPACE}/db1")
        status = await api.get("/v1/status")
        metrics = (await api.get("/metrics")).body.decode()
        page = (await api.get("/")).body.decode()
        vm_page = (await api.get(f"/vmis/{NAMESPACE}/db1")).body.decode()
    assert verdict["reason"] == reason
    assert {entry["reason"] for entry in blocked.json["blocked"]} == {reason}
    assert [rule["reason"] for rule in explained.json["rules"] if rule["blocks"]] == [reason]
    assert f'descheduler_kubevirt_vmis{{node="n1",verdict="{reason}"}} 1.0' in metrics
    counted = f'{{namespace="{NAMESPACE}",node="n1",reason="{reason}"}} 1.0'
    assert f"descheduler_kubevirt_eviction_blocks_total{counted}" in metrics
    for html in (page, vm_page):
        assert f'<code data-field="reason">{reason}</code>' in html

    vmi = msgspec.json.decode(explained.body, type=VmiAnswer)
    text = show_vmi(vmi, PIPED)
    assert f" may not be moved now: {REASONS[reason].held}" in text.splitlines()[0]
    assert f"  {next(rule.rule for rule in vmi.rules if rule.blocks)} " in text
    held = show_status(
        msgspec.json.decode(status.body, type=StatusAnswer),
        None,
        msgspec.json.decode(blocked.body, type=BlockedAnswer),
        PIPED,
    )
    assert f"blocked: {reason}" in held
    evidence = api.store.evidence(NAMESPACE, "db1")
    assert evidence is not None
    verdicts = api.service.view.read(NOW, api.store.trust)
    judged = verdicts.find(evidence.vmi.namespace, evidence.vmi.name)
    assert judged is not None
    message = write_message(evidence, judged.verdict(None), api.policy, NOW)
    assert f"VMI {NAMESPACE}/db1: {reason}" in message
    assert write_blocked(judged.verdict(None)).startswith(f"Eviction blocked: {reason}")
    if judged.verdict(None).not_before is None:
        assert REASONS[reason].until in held
        assert REASONS[reason].until in page
