"""Errors that every other attempt would meet again."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from typing import Final

from .allowed import TRANSIENT

_UNKNOWN: Final = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
"""What getaddrinfo says of a name that does not exist, or has no address. Not every system has both."""

_NO_SIGN_IN: Final = re.compile(
    "SOCKS5 authentication|No username/password supplied"  # PySocks
    "|^Invalid username/password|^Requested .+ from proxy server, but got"  # httpcore
)
"""What the libraries say when a SOCKS proxy lets nobody in, or not with this password."""


def is_permanent(
    error: BaseException, also: tuple[type[BaseException], ...], handled: BaseException | None
) -> bool:
    """Return True if the error, or one of those that led to it, is permanent.

    These are: a certificate that is not trusted, a host whose name is unknown (not one whose name
    server does not respond), and a proxy that refuses the connection for good, such as with 407, or a
    SOCKS proxy the sign-in.

    :param also: more kinds of permanent errors.
    :param handled: what the caller was handling when the call began. It has nothing to do with the
        call, but Python counts it among what led to the error.
    """
    kinds: tuple[type[BaseException], ...] = (ssl.SSLCertVerificationError, *also)
    return any(
        isinstance(one, kinds) or _is_unknown_host(one) or _is_refusal(one)
        for one in _chain(error, handled)
    )


def _chain(error: BaseException | None, handled: BaseException | None) -> Iterator[BaseException]:
    while error is not None and error is not handled:
        yield error
        # Event loops group the errors of a host's addresses; Python 3.10 has no name for such a group.
        yield from getattr(error, "exceptions", ())
        error = error.__cause__ or error.__context__


def _is_unknown_host(error: BaseException) -> bool:
    return isinstance(error, socket.gaierror) and error.errno in _UNKNOWN


def _is_refusal(error: BaseException) -> bool:
    # No attribute says it: http.client and httpcore put the status of a proxy's response into the text.
    status = re.match(r"(?:Tunnel connection failed: )?(4[0-9]{2}) ", str(error))
    if status is not None:
        return int(status[1]) not in TRANSIENT
    return _NO_SIGN_IN.search(str(error)) is not None
