"""Which texts PostgreSQL has parsed, and so will parse again.

psycopg2 writes values into a text, so ``IN %s`` is a good statement with one tuple and none with an
empty one. A text is known with the shape of its values: their types, and whether a sequence is empty.
A text with a place for a value inside quotes (``interval '%s days'``), or behind a letter, is never
known: there, what can be parsed depends on the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any
from uuid import UUID

from .sqltext import LONG, Room, without_noise

Shape = tuple[Any, ...]

_SCALARS = frozenset(
    {type(None), bool, int, str, bytes, memoryview, date, datetime, time, timedelta, UUID}
)
"""Types of which every value is one literal. What others become, nobody knows but their adapters."""

_NUMBERS: dict[Any, Any] = {float: isfinite, Decimal: Decimal.is_finite}
"""Types of which some values are no numbers to PostgreSQL, but text in quotes; and which are."""

_SEQUENCES = frozenset({list, tuple})


def shape_of(values: Any) -> Shape | None:
    """Return what decides if a text with these values can be parsed; None if that is unknown."""
    if values is None:
        return ()
    # A mapping of another class gives its names here: they are of no known type, or tell no more.
    given = values.values() if type(values) is dict else values
    kinds = tuple(map(type, given))
    if _SCALARS.issuperset(kinds):
        return kinds
    return _shape_of_each(given)


def _shape_of_each(values: Iterable[Any]) -> Shape | None:
    shape: list[Any] = []
    for value in values:
        kind: Any = type(value)
        if kind in _SEQUENCES:
            inside = _shape_of_each(value)
            if inside is None:
                return None
            # More of the same, with commas between them, are parsed as one is.
            kind = (kind, frozenset(inside))
        elif kind in _NUMBERS:
            kind = (kind, _NUMBERS[kind](value))
        elif kind not in _SCALARS:
            return None
        shape.append(kind)
    return tuple(shape)


Text = tuple[str, Shape | None]
"""A text, and the shape of the values that it is sent with."""

parsed: set[Text] = set()
"""What the servers have parsed. It holds no shape of None."""

_room = Room()


_PLACE = re.compile(r"(?P<behind>\w?)%(?:s|\()")


def _depends_on_values(text: str) -> bool:
    text = text.replace("%%", "")
    places = _PLACE.findall(text)
    return any(places) or len(places) > len(_PLACE.findall(without_noise(text)))


def note_parsed(text: Text) -> None:
    """Add a text to :data:`parsed`, unless it is long: reading it would cost more than it saves."""
    if text[1] is None or len(text[0]) >= LONG or _depends_on_values(text[0]):
        return
    if _room.takes(text[0], parsed):
        parsed.add(text)
