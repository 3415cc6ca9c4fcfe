"""What each specification fixes about idempotency keys over HTTP: one row of one table.

A row changes defaults, words and headers, never when a view runs; but for ``amends``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flask_idempotency.core.errors import ACP_CODES, Problem

FIRST_SENT = "Repeatability-First-Sent"
"""The header that says when a key was first sent (OASIS Repeatable Requests 1.0, section 3.1.2)."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One specification; what it leaves open is as in the IETF draft.

    ``defaults`` are those of settings, by their names; ``fingerprint`` is that of the option. By the
    type of the problem, ``statuses`` has the statuses that differ, and ``codes`` the codes of a body in
    ACP's form; ``media_type`` is that of problems. ``echoes_key``: every response has the key's header
    of its request. ``folds_case``: the case of a key in the header does not count. ``first_sent`` names
    the request header that must come with the key, ``result`` the response header that says whether the
    request was accepted. ``amends``: after an attempt that left no response, another request may use
    its key.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = "request"
    statuses: Mapping[str, int] = field(default_factory=dict)
    codes: Mapping[str, str] | None = None
    media_type: str = "application/problem+json"
    echoes_key: bool = False
    folds_case: bool = False
    first_sent: str = ""
    result: str = ""
    amends: bool = False

    def status_of(self, kind: Problem | type[Problem]) -> int:
        """The status of a problem."""
        return self.statuses.get(kind.type, kind.status)

    def named(self, kind: Problem | type[Problem], base: str) -> dict[str, str]:
        """The members of a response that say which problem it is; ``base`` is that of its type."""
        if self.codes is None:
            return {"type": base + kind.type}
        server = "service_unavailable" if kind.status == 503 else "processing_error"
        code = self.codes.get(kind.type, kind.type.replace("-", "_"))
        return {"type": "invalid_request" if kind.status < 500 else server, "code": code}


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        # draft-ietf-httpapi-idempotency-key-header, and RFC 9457 for problems
        Profile(name="ietf"),
        # Agentic Commerce Protocol, RFC on agentic checkout, sections 3.1 and 6 (after 2026-04-17)
        Profile(
            name="acp",
            fingerprint="json-values",  # section 6.2
            codes=ACP_CODES,
            media_type="application/json",
            echoes_key=True,
            amends=True,  # section 6.5
        ),
        # OASIS Repeatable Requests 1.0, sections 3 and 5
        Profile(
            name="repeatable-requests",
            defaults={
                "header": "Repeatability-Request-ID",
                "required": False,
                "refuse_old_keys": True,
            },
            statuses={"key-reused": 400, "key-expired": 412},
            folds_case=True,  # section 3.1.1
            first_sent=FIRST_SENT,
            result="Repeatability-Result",
        ),
    )
}
"""By their names."""
