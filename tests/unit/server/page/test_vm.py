"""The page of one VM, which shows the whole answer of GET /v1/vmis/{namespace}/{name}."""

import pytest

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Requester, Why, WhySource
from exporter.engine.facts.policy import Override
from exporter.engine.facts.states import State
from exporter.server.page.render import render_vm
from exporter.settings import Links
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_policy,
    a_running_state,
    a_vmi,
    a_vmim,
    some_evidence,
)
from tests.support.hostile import HOSTILE
from tests.unit.cli.answers import cooling, stuck
from tests.unit.engine.evacuations.test_diagnosis import an_evacuation
from tests.unit.server.api.test_answers import explained
from tests.unit.server.page.test_render import LINKS, Document


STAYS = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", "PVC db1 is not shared")
FAILED = Why(WhySource.FAILED_ATTEMPT, "Scheduling", "after Scheduling 5m", NOW - 60.0)


def shown(evidence: Evidence, *why: Why, linked: bool = True, links: Links = LINKS) -> Document:
    """The page of a VM with this evidence and these reasons."""
    return Document(render_vm(explained(evidence, why=why), links, linked=linked))


def fields(page: Document, name: str) -> list[str]:
    """The texts of the elements with this `data-field`, with single spaces."""
    cells = (element for element in page.elements if element.attributes.get("data-field") == name)
    return [" ".join(cell.text.split()) for cell in cells]


def test_it_says_why_in_the_cluster_s_words() -> None:
    """Each reason is shown once with its source and age, and the next step fits the cause."""
    page = shown(an_evacuation(vmi={"migratable": False}), STAYS, FAILED)
    text = page.text("evacuation")

    assert fields(page, "whySource") == ["LiveMigratable", "FailedAttempt"]
    assert text.count("DisksNotLiveMigratable: PVC db1 is not shared") == 1
    assert "Scheduling: after Scheduling 5m 1 min ago" in text
    assert fields(page, "nextStep")[0].startswith("Remove what makes the VM non-migratable")
    assert fields(page, "command")[0].startswith("kubectl -n shop get virtualmachineinstance db1")
    assert fields(page, "runbook") == ["KubeVirtEvacuationStuck#not_migratable"]
    assert fields(page, "state") == ["not_migratable"]


def test_the_links_of_the_settings_are_about_this_vm() -> None:
    """Names in a URL are encoded, so that they cannot change where it leads."""
    links = Links(
        runbooks="https://books.example/{alert}.html",
        grafana="https://grafana.example/d/vm?var-namespace={namespace}&var-name={name}",
        console="https://console.example/k8s/ns/{namespace}/{name}/on/{node}",
    )
    page = shown(stuck(name="db1&x=/../<", node="n1"), links=links)
    targets = [link.attributes["href"] for link in page.all("a") if "rel" in link.attributes]

    assert targets == [
        "https://books.example/KubeVirtEvacuationStuck.html#quota",
        "https://grafana.example/d/vm?var-namespace=shop&var-name=db1%26x%3D%2F..%2F%3C",
        "https://console.example/k8s/ns/shop/db1%26x%3D%2F..%2F%3C/on/n1",
    ]
    assert "elsewhere" not in [element.attributes.get("id") for element in shown(stuck()).elements]


def test_the_policy_of_the_vm_is_named() -> None:
    """The page names the VM's entry of `policy.overrides` and shows its values."""
    own = a_policy(migration_cooldown=3600.0, max_migration_cooldown=0.0)
    policy = a_policy(overrides=(Override(name="dbs", policy=own, namespaces=("shop",)),))
    vmi = explained(some_evidence(vmi=a_vmi(override="dbs")), policy=policy)
    page = Document(render_vm(vmi, LINKS, linked=True))

    assert fields(page, "policy") == ["dbs"]
    assert "dbs, minimum 1 h, maximum none, window 1 d" in page.text("main")


def test_a_vm_that_cools_down() -> None:
    """The page of a VM in cooldown shows its release, its rules and its migrations."""
    page = shown(cooling())

    assert page.text("verdict").startswith("Blocked by cooldown, until in ")
    assert "migrations in the window: 2;" in page.text("rules")
    assert len(fields(page, "outcome")) == 2
    assert not [tag for tag in page.elements if tag.attributes.get("id") == "evacuation"]


def test_the_post_copy_warning_stands_beside_the_cancel_command() -> None:
    """The cancel command has a warning about post-copy, and is missing during post-copy."""
    (command,) = fields(shown(stuck()), "cancel")
    assert command.startswith('echo \'{"evacuationNodeName":"n1"}\' | kubectl replace --raw /apis')
    assert "Never cancel in post-copy, because that kills the VM" in shown(stuck()).text(
        "evacuation"
    )

    running = an_evacuation(vmi={"migration": a_running_state(mode="PostCopy")})
    assert fields(shown(running), "cancel") == []
    assert fields(shown(running), "mode") == ["PostCopy"]


@pytest.mark.parametrize("linked", [True, False])
def test_it_links_to_the_same_as_json(linked: bool) -> None:
    """The page links to its JSON if the listener serves the API."""
    links = {link.attributes["href"] for link in shown(cooling(), linked=linked).all("a")}
    assert "/" in links
    assert ("/v1/vmis/shop/db1" in links) is linked


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_only_text(text: str) -> None:
    """Malicious reasons, names and nodes create no element, attribute or script."""
    why = Why(WhySource.LIVE_MIGRATABLE, text[:64], text[:1024])
    plain = shown(an_evacuation(vmi={"migratable": False}), STAYS)
    page = shown(an_evacuation(vmi={"migratable": False}), why)

    assert [element.tag for element in page.elements] == [element.tag for element in plain.elements]
    assert [sorted(element.attributes) for element in page.elements] == [
        sorted(element.attributes) for element in plain.elements
    ]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_nodes_and_users_are_only_text(text: str) -> None:
    """Malicious nodes, users and UIDs in the history create no element or attribute."""

    def history(uid: str, node: str, user: str) -> Document:
        asked = Requester(NOW - 800.0, user)
        moved = a_migration(source_node=node, target_node="n1", requested_by=asked)
        return shown(some_evidence(history=a_history(**{uid: moved})))

    plain, page = history("m1", "n2", "alice"), history(text[:64], text[:253], text[:1024])

    assert [(element.tag, sorted(element.attributes)) for element in page.elements] == [
        (element.tag, sorted(element.attributes)) for element in plain.elements
    ]


def test_a_migration_of_the_drawing_leads_to_its_row() -> None:
    """Each migration of the drawing has a text, and a link to its row, which has the same facts."""
    page = shown(cooling())
    links = [link.attributes for link in page.all("a") if "aria-label" in link.attributes]

    assert [link["href"] for link in links] == ["#m-m1", "#m-m2"]
    assert "n2 to n1, took 3 min 12 s, evacuation, by alice: succeeded" in str(links[1])
    assert page.text("m-m2") == (
        "10 min ago 07:50:00 UTC n2 n1 3 min 12 s evacuation alice succeeded yes"
    )
    assert page.text("lanes-label").startswith("2 migrations in the last 1 h 30 min, cooling")


def test_a_stuck_move_says_what_to_do() -> None:
    """A user's migration that a quota refuses: the page begins with the next step."""
    vmim = a_vmim(phase="Pending", created=NOW - 86_400.0, wait_reason=State.QUOTA)
    page = shown(some_evidence(vmi=a_vmi(migratable=True), vmims=(vmim,)))
    text = page.text("main")

    assert text.index("its manual migration does not end") < text.index("Raise the ResourceQuota")
    assert text.count("Raise the ResourceQuota") == 1
    assert fields(page, "state") == ["quota"]
    assert fields(page, "trigger") == ["manual"]
