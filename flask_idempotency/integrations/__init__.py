"""Other packages: each file knows one of them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def required(package: str, *, extra: str) -> Iterator[None]:
    """Import what a package has; name the extra that installs it where it is missing."""
    try:
        yield
    except ImportError as error:
        install = f"pip install 'flask-idempotency[{extra}]'"
        raise ImportError(f"{package} is needed ({error}): {install}") from error
