"""How a step is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigurationError, IdempotencyError, shown
from .storable import interrupts, releases

Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class StepRetry:
    """How ``current_operation.step(..., retry=StepRetry(...))`` calls its function again.

    ``on`` is a class of errors, or a tuple of classes: those after which the call may be repeated. It
    has no default, as only you know them. ``attempts`` is how often the function is called at most. The
    pause after the first failure is up to ``first`` seconds, then ``factor`` times as long after each,
    up to ``longest``; how long it is in that range is random, so that not all come back at once.

    Raises ``ConfigurationError`` for a wrong value.
    """

    on: Errors
    attempts: int = 3
    first: float = 0.2
    factor: float = 2.0
    longest: float = 10.0

    def __post_init__(self) -> None:
        classes = self.on if isinstance(self.on, tuple) else (self.on,)
        if not classes or not all(map(_is_exception, classes)):
            _refuse(
                "on",
                self.on,
                "a class of exceptions, none of this package, or a tuple of such classes",
            )
        if type(self.attempts) is not int or not 2 <= self.attempts <= 100:
            _refuse("attempts", self.attempts, "an integer from 2 to 100")
        for name, low, high in (("first", 0, 3600), ("longest", 0, 3600), ("factor", 1, 100)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                _refuse(name, value, f"a number from {low} to {high}")

    def covers(self, error: Exception, failures: int) -> bool:
        """Return True if the function is called again after ``error``, its ``failures``-th in a row.

        Never after a problem of ours, and never after what a queue raises to stop or repeat its job.
        """
        if failures >= self.attempts or not isinstance(error, self.on):
            return False
        return not (isinstance(error, IdempotencyError) or interrupts(error) or releases(error))

    def longest_pause(self, failures: int) -> float:
        """The most seconds to wait after so many failures."""
        return min(self.longest, self.first * self.factor ** (failures - 1))


def _is_exception(value: object) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, Exception)
        and not issubclass(value, IdempotencyError)  # never repeated
    )


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ConfigurationError(f"StepRetry has {name}={shown(value)}; allowed: {allowed}")
