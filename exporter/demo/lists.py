"""Lists and their pages: which objects, of which revision, and the bytes of the answer. No I/O."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Iterable, Sequence

import msgspec

from exporter.demo import status
from exporter.demo.objects import Object
from exporter.demo.requests import RequestInfo, parse_revision, parse_selector
from exporter.demo.status import ApiResource
from exporter.demo.store import ObjectStore, StoredObject


def render_list(store: ObjectStore, request: RequestInfo) -> bytes:
    """The body of the answer to a list request."""
    resource, selector = request.resource, parse_selector(request)
    entries, revision = _find_entries(store, request)
    limit = int(request.query.get("limit") or 0)
    if request.query.get("resourceVersion") == "0":
        # Served from the watch cache, which does not page (`cacher.go: computeListLimit`).
        limit = 0
    page: list[StoredObject] = []
    token, remaining = "", None
    for position, entry in enumerate(entries):
        if not selector.matches_entry(entry):
            continue
        if limit and len(page) == limit:
            token = _encode_token(revision, page[-1].key + "\0")
            if selector.is_empty:
                remaining = sum(map(selector.matches_entry, entries[position:]))
            break
        page.append(entry)
    if token and revision == store.revision:
        store.keep_snapshot(resource)
    return _encode_list(resource, page, revision, token, remaining)


def _find_entries(store: ObjectStore, request: RequestInfo) -> tuple[Sequence[StoredObject], int]:
    """The objects to list, or those left for the next page, and their revision."""
    query, resource = request.query, request.resource
    if token := query.get("continue"):
        return _continue(store, resource, token)
    revision = parse_revision(query)
    if revision is not None and revision > store.revision:
        raise status.too_large(revision, store.revision)
    # With a limit, a version means exactly that version (`cacher/delegator: ShouldDelegateList`).
    if revision and query.get("limit"):
        entries = store.snapshot(resource, revision)
        if entries is None:
            raise status.expired(status.TOO_OLD_LIST)
        return entries, revision
    return store.caches[resource].all(), store.revision


def _continue(
    store: ObjectStore, resource: ApiResource, token: str
) -> tuple[Sequence[StoredObject], int]:
    revision, start = _decode_token(token)
    # The answer to an expired token offers a token of revision -1, which lists the rest as it is
    # now.
    if revision == -1:
        revision = store.revision
    entries = store.snapshot(resource, revision)
    if entries is None:
        raise status.expired(status.TOO_OLD_CONTINUE, _encode_token(-1, start))
    return entries[bisect.bisect_left(entries, start, key=lambda entry: entry.key) :], revision


def _encode_token(revision: int, start: str) -> str:
    token = msgspec.json.encode({"v": "meta.k8s.io/v1", "rv": revision, "start": start})
    return base64.urlsafe_b64encode(token).rstrip(b"=").decode()


def _decode_token(token: str) -> tuple[int, str]:
    try:
        decoded = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(decoded["rv"]), str(decoded["start"])
    except (ValueError, KeyError, TypeError) as error:
        message = f"invalid continue token: continue key is not valid: {error}"
        raise status.bad_request(message) from None


def _encode_list(
    resource: ApiResource,
    page: Iterable[StoredObject],
    revision: int,
    token: str,
    remaining: int | None,
) -> bytes:
    metadata: Object = {"resourceVersion": str(revision)}
    if token or resource.custom:
        # Unstructured lists always have `continue`, empty on the last page.
        metadata["continue"] = token
    if remaining:
        metadata["remainingItemCount"] = remaining
    head = msgspec.json.encode(metadata, order="sorted" if resource.custom else None)
    version, kind = resource.api_version.encode(), resource.kind.encode()
    if resource.custom:
        items = b",".join(entry.body for entry in page)
        return b'{"apiVersion":"%s","items":[%s],"kind":"%sList","metadata":%s}\n' % (
            *(version, items, kind, head),
        )
    # Items of a typed list have no kind and version; in the stored bytes these come first.
    prefix = len(b'{"kind":"%s","apiVersion":"%s",' % (kind, version))
    items = b",".join(b"{" + entry.body[prefix:] for entry in page)
    return b'{"kind":"%sList","apiVersion":"%s","metadata":%s,"items":[%s]}\n' % (
        *(kind, version, head, items),
    )
