"""Mappings that keep only the newest entries, so that they cannot grow without bound."""

from typing import TypeVar


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def put_newest(known: dict[_Key, _Value], key: _Key, value: _Value, *, most: int) -> None:
    """Set an entry as the newest one, and drop the oldest one if there are more than `most`."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
