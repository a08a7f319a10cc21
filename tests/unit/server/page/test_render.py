"""The page's HTML: its text, and protection against injection."""

import base64
import gc
import hashlib
import re
import weakref
from html.parser import HTMLParser
from typing import Any

import pytest

from exporter.counters import BlockedEviction, Counters
from exporter.engine.facts.changes import Observed
from exporter.engine.facts.model import KubeVirtSettings, Outcome, Resource, Seconds, Why, WhySource
from exporter.engine.facts.policy import Reason
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import Trust
from exporter.health import HistoryHealth, Watched
from exporter.server.api.handlers import Service
from exporter.server.page.model import PageModel
from exporter.server.page.render import (
    PAGE_HEADERS,
    render_page,
    write_time,
)
from exporter.server.page.tables import PageFilter
from exporter.settings import Links
from exporter.text import to_datetime, to_optional_datetime, write_instant
from tests.support.builders import (
    NOW,
    a_cordon,
    a_vmi,
    a_vmim,
)
from tests.unit.server.api.test_handlers import a_health, cooling
from tests.unit.server.page.test_model import (
    bad_day,
    build_model,
    busy_service,
    evacuating,
    make_service,
)


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "../../etc/passwd?a=b&c#d",
    "</title></style></svg><b>",
)


SLUG = "make_room_on_another_node"
LINKS = Links()
"""Links to the same server, so that every link to another one is a fault."""


class Element:
    """One element of a page: its attributes, and the text in it."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.text = ""


class Document(HTMLParser):
    """A parsed page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag in {"td", "th", "dd"} or element.attributes.get("class") == "sub":
            self.handle_data(" ")
        if tag not in {"meta", "link", "input", "wbr", "img", "col"}:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag, "every element is closed where it should be"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        """Every element with a tag."""
        return [element for element in self.elements if element.tag == tag]

    def text(self, identity: str) -> str:
        """The text of the element with this id, with single spaces."""
        (match,) = (
            element for element in self.elements if element.attributes.get("id") == identity
        )
        return " ".join(match.text.split())


def draining_service() -> Service:
    """A service with a migratable VM on n3 and two VMs on n2; a drain restarts one of the two."""
    return make_service(
        KubeVirtSettings(eviction_strategy="LiveMigrate"),
        evacuating("old", migratable=False, namespace="bank", node="n2"),
        a_vmi(name="moving", uid="uid-of-moving", eviction_strategy="None", node="n2"),
        a_vmi(name="easy", uid="uid-of-easy", migratable=True, node="n3"),
    )


def render(model: PageModel, *, linked: bool = True) -> str:
    """The page as HTML."""
    return "".join(render_page(model, LINKS, linked=linked))


def shown(service: Service, filters: PageFilter | None = None) -> Document:
    """The rendered page of a service."""
    return Document(render(build_model(service, filters)))


SENTENCES: dict[str, tuple[dict[str, Any], Seconds, str, str]] = {
    "fresh": ({}, 0.5, "yes", "Healthy: ready, all resources visible, last contact now."),
    "stale": (
        {},
        240.0,
        "barely",
        (
            "Stale: last contact 4 min ago; answers may be out of date. In 9 min only cooldowns"
            " still block."
        ),
    ),
    "closing": (
        {"closing": True},
        0.0,
        "no",
        "Not ready: the exporter is stopping, and gives no verdicts.",
    ),
    "not-ready": (
        {"health": a_health(Watched(Resource.PODS, None))},
        0.0,
        "no",
        "Not ready: the exporter is waiting for pods, and gives no verdicts.",
    ),
}


class TestTrust:
    """The first sentence of the page."""

    @pytest.mark.parametrize(
        ("changes", "later", "level", "text"), SENTENCES.values(), ids=SENTENCES
    )
    def test_it_is_said_in_a_sentence(
        self, changes: dict[str, Any], later: Seconds, level: str, text: str
    ) -> None:
        """The first sentence says whether the data is current, or what the exporter waits for."""
        model = build_model(make_service(**changes), now=NOW + later)

        page = Document(render(model))

        assert f'class="verdict {level}" id="verdict"' in render(model)
        assert page.text("verdict") == text

    def test_a_missing_permission_has_its_consequence(self) -> None:
        """A missing permission is shown with its consequence and the API server's message."""
        health = a_health()
        health.of(Resource.PODS)[0].rejected = "403 <no>"
        page = shown(make_service(health=health))

        assert page.text("verdict").startswith("Mostly healthy: the exporter may not read")
        assert page.text("loss-pods") == (
            "May not read pods. Missing: policy.guards.evacuations, diverged evacuations, and the"
            " states that depend on pods. in the cluster: 403 <no>"
        )
        assert "rejected" in page.text("watch-pods")

    def test_a_resource_has_one_line_for_all_namespaces(self) -> None:
        """A resource has one line for all namespaces, with its counts, contact and error."""
        health = a_health(
            Watched(Resource.VMIS, "shop", synced=True, contact=NOW),
            Watched(Resource.VMIS, "bank", synced=True, contact=NOW - 5),
            Watched(Resource.PODS, "shop", rejected="403 no"),
            Watched(Resource.PODS, "bank", synced=True, contact=NOW, trouble="slow"),
        )
        page = shown(make_service(health=health))

        assert page.text("loss-pods").endswith("shop: 403 no")
        assert page.text("watch-virtualmachineinstances").endswith("synced 5 s ago 07:59:55 UTC")
        assert "1 of 2 namespaces synced, 1 rejected slow now" in page.text("watch-pods")

    def test_the_history_file_is_shown(self) -> None:
        """The history file is shown with its last write, and with what went wrong since."""
        health = a_health()
        assert shown(make_service(health=health)).text("history").startswith("none:")
        health.history = HistoryHealth()
        page = shown(make_service(health=health))
        assert page.text("history") == "a file, not written since the start"
        health.history = HistoryHealth(written_at=NOW - 90, vmis=3, trouble="the disk is full")
        assert shown(make_service(health=health)).text("history") == (
            "a file with 3 VMs, written 1 min 30 s ago 07:58:30 UTC the disk is full"
        )

    def test_until_it_is_synced_there_is_no_table(self) -> None:
        """Before the first sync the page has no table."""
        page = shown(make_service(cooling("db1"), health=a_health(Watched(Resource.VMIS, None))))

        assert page.text("verdict").startswith("Not ready: the exporter is waiting for virtual")
        assert "db1" not in page.text("main")
        assert [table.attributes.get("id") for table in page.all("table")] == ["watches"]


class TestRows:
    """The rows of single VMs."""

    def test_an_evacuation_has_its_row(self) -> None:
        """The row of an evacuation has its state, attempts, source and action."""
        page = shown(busy_service())
        row = page.text("e-uid-of-old")

        assert row.startswith(
            "bank/old on n2 not_migratable since 1 h 6 min ago 06:53:20 UTC 0 fai"
        )
        assert "State not_migratable; stuck by age" in row
        assert "source: unknown" in row
        assert "Remove what makes the VM non-migratable" in row
        assert "kubectl replace --raw /apis/subresources.kubevirt.io/v1/namespaces/bank/" in row
        assert "stuck by" not in page.text("e-uid-of-young")
        assert "blocked by migration_in_progress" in page.text("e-uid-of-young")
        assert page.text("count-stuck") == "1"

    def test_stuck_vms_are_grouped_by_next_step(self) -> None:
        """The totals come first, and each step has its number of VMs, its runbook and its rows."""
        page = shown(bad_day())
        heads = [" ".join(one.text.split()) for one in page.all("h3")]
        first = page.text("stuck_KubeVirtEvacuationStuck_target_unschedulable_" + SLUG)

        assert page.text("stuck").startswith(
            "30 stuck VMs 12 make room on another node 6 remove what makes the VM non-migratable 5"
        )
        assert heads[0] == (
            "12 VMs: make room on another node runbook KubeVirtEvacuationStuck#target_unschedulable"
        )
        assert heads[-1] == "6 VMs: wait runbook KubeVirtEvacuationStuck#none"
        assert first.count("target_unschedulable since") == 12
        assert "Trigger manual" in page.text("e-uid-shop-frontend-0")

    def test_a_row_does_not_change_with_each_attempt(self) -> None:
        """Before and in an attempt, the row of a failing VM says the same, and opened the state."""
        page = shown(bad_day())
        rows = [page.text(f"e-uid-build-{number}") for number in range(4)]

        assert all("on n4 waiting for the next attempt since 3 h ago" in row for row in rows)
        assert "State capacity; stuck by age, failures" in rows[0]
        assert "State migrating; stuck by age, failures" in rows[3]

    def test_a_page_without_names_has_the_totals(self) -> None:
        """Where VMs are not named, the page says how many are stuck, by next step."""
        text = Document(render(build_model(bad_day(), named=False))).text("hidden")

        assert "30 stuck VMs, by next step: 12 make room on another node 6 remove" in text
        assert "shop" not in text

    def test_a_backoff_is_shown(self) -> None:
        """A backoff is shown with its length and the time of KubeVirt's next attempt."""
        failed = {
            "phase": "Failed",
            "finished": True,
            "finished_at": NOW - 5,
            "outcome": Outcome.FAILED,
        }
        from_n1 = {"vmi_name": "db1", "evacuates": "n1", "trigger": "evacuation"}
        page = shown(
            make_service(
                evacuating("db1"),
                a_vmim(name="m1", uid="m1", created=NOW - 30, **from_n1, **failed),
                a_vmim(name="m2", uid="m2", created=NOW - 4, **from_n1),
            )
        )

        row = page.text("e-uid-of-db1")
        assert "at least 1" in row
        assert "Attempt now m2: Pending" in row
        assert "Next try in 15 s 08:00:15 UTC, after a pause of 20 s" in row

    def test_a_blocked_vm_has_its_row(self) -> None:
        """The row of a blocked VM has the reason, the release and the progress of the cooldown."""
        page = shown(busy_service())

        assert page.text("b-uid-of-soon").startswith(
            "shop/soon on n1 cooldown checkpoint preEviction in 10 s 08:00:10 UTC 14 min 50 s"
        )
        assert "14 min 50 s of 15 min" in page.text("b-uid-of-soon")
        assert "migration_in_progress checkpoint filter the migration ends" in page.text(
            "b-uid-of-moving"
        )
        assert "startTimestamp is 2027-01-15T07:59:00Z" in page.text("b-uid-of-moving")
        (bar,) = (
            bar
            for bar in page.all("progress")
            if bar.attributes["aria-label"] == "Cooldown of shop/soon"
        )
        assert (bar.attributes["value"], bar.attributes["max"]) == ("890.0", "900.0")

    def test_a_blocked_eviction_is_shown(self) -> None:
        """A blocked eviction is shown with its user, age and result."""
        counters = Counters()
        asked = counters.blocked_evictions
        for user, denied in (("autoscaler", False), ("descheduler", True)):
            asked.record("uid-of-db1", BlockedEviction(user, NOW - 7, Reason.COOLDOWN, denied))
        page = shown(make_service(cooling("db1"), counters=counters))

        assert "eviction requested by descheduler 7 s ago" in page.text("b-uid-of-db1")
        assert "UTC, denied" in page.text("b-uid-of-db1")
        assert "eviction requested by autoscaler 7 s ago" in page.text("b-uid-of-db1")
        assert "UTC, allowed with a warning" in page.text("b-uid-of-db1")

    def test_both_reasons_are_shown(self) -> None:
        """The row of a VM that is blocked at both checkpoints has both reasons."""
        page = shown(make_service(cooling("db1"), a_vmim()))

        assert "the migration ends and in 5 min 08:05:00 UTC" in (page.text("b-uid-of-db1"))

    def test_a_node_has_its_row(self) -> None:
        """The row of a node counts its VMs by reason and by drain outcome."""
        page = shown(busy_service())

        assert page.text("n-n2") == "n2 2 1 1 of 2 1 0 0 0 1 0 1 0 0 0"

    def test_a_node_that_is_filtered_has_its_drain(self) -> None:
        """If the page has names, it says what a drain of the filter's node would do to each VM."""
        service = draining_service()
        reason = Why(WhySource.LIVE_MIGRATABLE, "HostDeviceNotLiveMigratable")
        old = service.store.evidence("bank", "old", Trust())
        assert old is not None
        service.store.apply(Observed(old.vmi, (reason,)), NOW)
        page = shown(service, PageFilter(node="n2"))
        cooled = shown(service, PageFilter(node="n3"))

        assert "It cannot be emptied. 1 of 2 VMs would not leave." in page.text("drain")
        assert "bank/old stays ? 0 LiveMigratable HostDeviceNotLiveMigratable" in page.text("drain")
        assert "shop/moving restarts ? 0" in page.text("drain")
        assert "It can be emptied." in cooled.text("drain")
        for filters, named in ((PageFilter(), True), (PageFilter(node="n2"), False)):
            html = render(build_model(service, filters, named=named), linked=named)
            assert 'id="drain"' not in html

    def test_the_sentences_about_a_drain_are_separate(self) -> None:
        """What cannot leave, the cordon and the External VMs are sentences, and 1 is singular."""
        service = make_service(
            KubeVirtSettings(eviction_strategy="LiveMigrate"),
            evacuating("old", migratable=False, node="n2"),
            a_vmi(name="theirs", uid="uid-of-theirs", eviction_strategy="External", node="n2"),
            a_cordon(name="n2", cordoned_at=NOW - 41),
        )
        page = shown(service, PageFilter(node="n2"))

        assert (
            "1 of 2 VMs would not leave. It was cordoned 41 s ago 07:59:19 UTC. It depends on"
            " others, who must move or stop 1 VM with the strategy External."
        ) in page.text("drain")
        assert "0 of 1 VM has left; 1 VM cannot leave." in page.text("drain-progress")

    @pytest.mark.parametrize("linked", [True, False])
    def test_it_links_to_the_api_where_there_is_one(self, linked: bool) -> None:
        """The page links to the API if the listener serves it."""
        html = render(build_model(busy_service()), linked=linked)
        links = {link.attributes["href"] for link in Document(html).all("a")}
        api = {"/v1/evacuations", "/v1/blocked", "/openapi.json"}

        assert {"/vmis/bank/old", "/metrics", "/readyz"} <= links
        assert api <= links if linked else not any("/v1/" in str(link) for link in links)


class TestForm:
    """The filter."""

    def test_it_shows_what_was_asked(self) -> None:
        """The form has the values of the current filter, and a link to reset the filter."""
        filters = PageFilter(
            namespace="bank", node="n2", state=State.BACKOFF, reason=Reason.COOLDOWN
        )
        page = shown(busy_service(), filters)
        values = {
            field.attributes["name"]: field.attributes["value"] for field in page.all("input")
        }
        chosen = [o.attributes["value"] for o in page.all("option") if "selected" in o.attributes]

        assert (values["namespace"], values["node"]) == ("bank", "n2")
        assert chosen == ["backoff", "cooldown", "time"]
        assert page.text("clear") == "Show all"


class TestSafety:
    """Texts from the cluster are escaped."""

    def test_a_hostile_name_is_text(self) -> None:
        """Malicious names, nodes, UIDs and messages create no element or attribute."""
        health = a_health()
        health.watched.append(Watched(Resource.PODS, HOSTILE[0], rejected=HOSTILE[1]))
        plain = shown(busy_service())
        facts = [
            fact
            for number, text in enumerate(HOSTILE)
            for fact in (
                cooling(text, namespace=text, node=text, uid=f"{number}{text}"),
                evacuating(f"e{text}", namespace=text, node=text, uid=f"e{number}{text}"),
            )
        ]
        filters = PageFilter(namespace="", node="", ignored=HOSTILE)
        page = shown(make_service(*facts, health=health), filters)

        assert [e.tag for e in page.elements].count("script") == 1
        assert {e.tag for e in page.elements} <= {e.tag for e in plain.elements} | {"p", "div"}
        allowed = {name for e in plain.elements for name in e.attributes}
        assert {name for e in page.elements for name in e.attributes} <= {*allowed, "open"}
        for text in HOSTILE:
            assert f"{text}/{text}" in page.text("blocked")
            asked = shown(busy_service(), PageFilter(namespace=text))
            assert text in [field.attributes.get("value") for field in asked.all("input")]
            assert len(asked.all("script")) == 1
        for link in page.all("a"):
            assert re.fullmatch(
                r"#\w+|/[\w/%.-]*(#\w+)?|/\?node=[\w%./-]*#drain", link.attributes["href"] or ""
            )

    def test_the_policy_names_what_is_in_the_page(self) -> None:
        """The Content-Security-Policy has the hashes of the page's only style and only script."""
        page = shown(busy_service())
        policy = dict(
            part.split(" ", 1) for part in PAGE_HEADERS["Content-Security-Policy"].split("; ")
        )
        for tag in ("style", "script"):
            (element,) = page.all(tag)
            digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
            assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
        assert policy["default-src"] == "'none'"
        assert "unsafe" not in str(policy)
        assert PAGE_HEADERS["Cache-Control"] == "no-store"

    def test_nothing_comes_from_elsewhere(self) -> None:
        """No element has a `style` attribute, an event handler or a URL of another origin."""
        for element in shown(busy_service()).elements:
            for name, value in element.attributes.items():
                assert name != "style"
                assert not name.startswith("on")
                if name in {"src", "href", "action"} and element.tag != "link":
                    assert str(value).startswith(("/", "#"))

    def test_every_id_is_given_once(self) -> None:
        """Every id is unique, because the refresh finds rows by their ids."""
        ids = [e.attributes["id"] for e in shown(busy_service()).elements if "id" in e.attributes]

        assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("instant", "text"),
    [
        (None, '<span class="none">never</span>'),
        (NOW + 0.4, "now 08:00:00 UTC"),
        (NOW - 86_400, "1 d ago 14 Jan 08:00 UTC"),
        (NOW + 720.5, "in 12 min 08:12:00 UTC"),
    ],
)
def test_instants_are_for_people_and_machines(instant: float | None, text: str) -> None:
    """A time is shown relative to now and in UTC, and its `datetime` attribute is exact."""
    html = write_time(to_optional_datetime(instant), to_datetime(NOW))

    assert re.sub(r"</?(time|span)[^>]*>", "", html) in (text, "never")
    assert instant is None or f'datetime="{write_instant(instant)}"' in html


def test_a_rendered_model_is_freed_without_a_garbage_collection() -> None:
    """Jinja's contexts and macros, which are reference cycles, do not keep the model."""
    model = build_model(busy_service())
    kept: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(model.vms)]
    gc.disable()
    try:
        assert render(model)
        del model
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()
