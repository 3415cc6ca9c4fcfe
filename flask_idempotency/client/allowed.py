"""What the values of a policy may be, and the message for one that could not work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

Rule: TypeAlias = tuple[tuple[type, ...], Callable[[Any], bool], str]
"""The types of a value, whether one of them is in its range, and both in words."""

GET_KEY: Final = frozenset({"POST", "PATCH"})
"""Methods that get a key. HTTP defines the others as safe to repeat."""

REPEATABLE: Final = GET_KEY | {"GET", "HEAD", "OPTIONS", "PUT", "DELETE"}
"""Methods that may be sent again."""

TRANSIENT: Final = frozenset({408, 425, 429})
"""Below 500, the responses that say "not now"."""

_NUMBER: Final = (int, float)

WHOLE: Final[Rule] = (int,), lambda value: value >= 0, "a whole number, 0 or more"
RETRIES: Final[Rule] = (
    (int, type(None)),
    lambda value: value is None or value >= 0,
    "a whole number, 0 or more, or None",
)
DEADLINE: Final[Rule] = _NUMBER, lambda value: 0 < value < math.inf, "a number of seconds above 0"
SECONDS: Final[Rule] = _NUMBER, lambda value: 0 <= value < math.inf, "a number of seconds, 0 or more"
HEADER: Final[Rule] = (
    (str,),
    lambda value: re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", value, re.ASCII) is not None,  # RFC 9110, 5.6.2
    "the name of an HTTP header",
)
METHODS: Final[Rule] = (
    (frozenset, set, list, tuple),
    lambda value: all(isinstance(name, str) and name in REPEATABLE for name in value),
    f"a set of {', '.join(sorted(REPEATABLE))}",
)
ERRORS: Final[Rule] = (
    (tuple,),
    lambda value: all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in value),
    "a tuple of exception classes",
)
CALLABLE: Final[Rule] = (Callable,), lambda _value: True, "a callable"  # type: ignore[assignment]
HOOK: Final[Rule] = (Callable, type(None)), lambda _value: True, "a callable, or None"  # type: ignore[assignment]


def check(name: str, value: object, rule: Rule) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a value that the rule does not allow."""
    kinds, in_range, allowed = rule
    right = isinstance(value, kinds) and not isinstance(value, bool)
    if not right or not in_range(value):
        error = ValueError if right else TypeError
        raise error(f"{name} is {value!r}; allowed: {allowed}")
