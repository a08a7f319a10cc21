"""The section `policy` of the settings: its values, its exceptions, and remarks about them."""

from typing import Any

from msgspec import structs

from exporter.engine.facts.model import Seconds
from exporter.engine.facts.policy import (
    COOLDOWN_VALUES,
    DEFAULT_POLICY,
    Override,
    Policy,
    PolicyValues,
)
from exporter.settings.document import Section, write_key
from exporter.settings.values import parse_boolean, parse_labels, parse_name, parse_names
from exporter.text import format_duration


_GUARDS = {
    write_key(name.removeprefix("guard_")): name
    for name in PolicyValues.__struct_fields__
    if name.startswith("guard_")
}
"""The fields of the policy that are keys of `policy.guards`."""


def write_policy(policy: Policy) -> dict[str, Any]:
    """The section `policy` without exceptions; durations are in seconds."""
    fields = structs.asdict(policy)
    guards = {key: fields.pop(name) for key, name in _GUARDS.items()}
    del fields["block"], fields["overrides"]
    return {write_key(name): value for name, value in fields.items()} | {"guards": guards}


def read_policy(section: Section, remarks: list[str]) -> Policy:
    """The section `policy` with its exceptions; adds to `remarks` what may surprise."""
    guards = section.section("guards")
    policy = section.read(Policy(), skip=(*_GUARDS.values(), "block", "overrides"))
    policy = structs.replace(
        policy,
        **{
            name: guards.take(key, parse_boolean, getattr(policy, name))
            for key, name in _GUARDS.items()
        },
    )
    entries = section.sections("overrides")
    guards.close()
    section.close()
    _check_cap(section, policy)
    _remark_policy(section, policy, remarks)
    return structs.replace(policy, overrides=_read_overrides(entries, policy))


def _read_overrides(entries: list[Section], policy: Policy) -> tuple[Override, ...]:
    """The exceptions from the policy; values that an entry omits come from the policy."""
    overrides: list[Override] = []
    for entry in entries:
        match = entry.section("match")
        override = Override(
            name=entry.take("name", parse_name, ""),
            namespaces=match.take("namespaces", parse_names, ()),
            vmi_labels=match.take("vmiLabels", parse_labels, ()),
            priority_classes=match.take("priorityClasses", parse_names, ()),
            policy=entry.read(policy, skip=(*_GUARDS.values(), "overrides")),
        )
        match.close()
        entry.close()
        _check_cap(entry, override.policy)
        if _check_override(entry, override, overrides):
            overrides.append(override)
    return tuple(overrides)


def _check_override(entry: Section, override: Override, before: list[Override]) -> bool:
    """Report the faults of an entry; False if the entry does not say which VMs it matches."""
    if not override.name and not entry.is_wrong("name") and not entry.is_broken:
        entry.report("name", "expected a name, there is none")
    if override.name and any(earlier.name == override.name for earlier in before):
        entry.report("name", f"{override.name!r} is the name of an earlier entry")
    if override.name == DEFAULT_POLICY:
        entry.report("name", f"{DEFAULT_POLICY!r} is the policy of VMs without an entry")
    if not (override.namespaces or override.vmi_labels or override.priority_classes):
        if not entry.is_broken:
            entry.report("match", "expected namespaces, vmiLabels or priorityClasses")
        return False
    first = next((earlier.name for earlier in before if earlier.shadows(override)), None)
    if first is not None:
        entry.report("match", f"never reached: the earlier entry {first!r} matches all these VMs")
    return True


def _check_cap(section: Section, policy: Policy) -> None:
    floor, cap = policy.migration_cooldown, policy.max_migration_cooldown
    if not floor or not cap or cap >= floor:
        return
    if section.is_wrong("migrationCooldown") or section.is_wrong("maxMigrationCooldown"):
        return

    def describe(key: str, value: Seconds) -> str:
        return f"{key} {format_duration(value)}{'' if section.has(key) else ' (not set here)'}"

    section.report(
        "maxMigrationCooldown",
        f"{describe('maxMigrationCooldown', cap)} is below {describe('migrationCooldown', floor)}",
    )


def _remark_policy(section: Section, policy: Policy, remarks: list[str]) -> None:
    for name, words in COOLDOWN_VALUES.items():
        key = write_key(name)
        if words.in_plugin and section.has(key) and not getattr(policy, name):
            remarks.append(
                f"policy.{key}: 0 means {words.off}, but in the plugin KubevirtMigrationAware 0"
                " means its default"
            )
    window, cap = policy.migration_history_window, policy.max_migration_cooldown
    if section.has("migrationHistoryWindow") and window and cap and window <= 6 * cap:
        remarks.append(
            f"policy.migrationHistoryWindow: {format_duration(window)} is not longer than six"
            f" times maxMigrationCooldown ({format_duration(6 * cap)}): migrations leave the"
            " window before the cooldown of a VM that moves all the time stays at its maximum"
        )
