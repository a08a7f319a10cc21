"""Fields that several answers and requests of the query API have in common, and its error body."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct


LONGEST_NAMESPACE = 63
LONGEST_NAME = 253
"""The most characters that Kubernetes allows for the name of a VMI or a node."""
Namespace = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAMESPACE)]
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Uid = Annotated[str, Meta(max_length=128)]
Remark = Annotated[str, Meta(max_length=253)]
Timestamp = Annotated[datetime, Meta(tz=True)]
"""A timestamp is written as RFC 3339 in UTC, with microseconds unless they are 0."""


def means(text: str) -> Meta:
    """A field's description in the OpenAPI document."""
    return Meta(description=text)


AsOf = Annotated[Timestamp, means("the instant of the answer, by the exporter's clock")]
ObservedAt = Annotated[
    Timestamp | None,
    means(
        "the last contact with the API server about VMIs, of several watched namespaces the oldest;"
        " null: none yet"
    ),
]
Stale = Annotated[
    bool,
    means(
        "true: the exporter has had no contact about VMIs, or about those of one watched namespace,"
        " for kube.staleAfter, or may no longer read the namespace of a VMI in the answer"
    ),
]
BlindSpots = Annotated[
    dict[str, str], means("the resources that the exporter may not read, and why")
]


class Problem(Struct, kw_only=True):
    """An error (RFC 9457, application/problem+json)."""

    title: str
    """the kind of error"""
    status: int
    """the HTTP status"""
    detail: str
    """what is wrong, where, and what was expected"""
    type: str = "about:blank"
    """always about:blank"""
