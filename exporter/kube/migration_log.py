"""One log line when a migration begins and one when it has ended."""

import structlog

from exporter.engine.model import MigrationState, Vmi


log = structlog.stdlib.get_logger()


def log_migration(before: Vmi | None, vmi: Vmi) -> None:
    """Log what a watch event changed in the migration of a VMI."""
    known = before.migration if before is not None and before.uid == vmi.uid else None
    state = vmi.migration
    if state is None or state == known:
        return
    same = known is not None and known.uid == state.uid and known.start == state.start
    names = {"namespace": vmi.namespace, "name": vmi.name, "node": vmi.node, "migration": state.uid}
    if state.running and not (same and _has_begun(known)):
        log.info("migration_began", **names)
    if state.ended and not (same and known is not None and known.ended):
        seconds = None if state.start is None or state.end is None else state.end - state.start
        failed = state.outcome.name == "FAILED"
        log.info("migration_ended", **names, failed=failed, seconds=seconds)


def _has_begun(state: MigrationState | None) -> bool:
    return state is not None and (state.start is not None or state.ended)
