"""Who is compared: what each package needs, how it is used, and what it does not promise.

What it does not promise is what its own documentation says, or its source where that says nothing. What
it does after a crash is not written here: it is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Package:
    """A package: its ``requirements``, pinned, and what its documentation leaves ``unpromised``."""

    requirements: tuple[str, ...]
    unpromised: str


PACKAGES = {
    "ours": Package((), ""),
    "idemkit": Package(
        ("idemkit[redis,postgres]==1.0.2", "asyncpg==0.32.0"),
        "One transaction for the record and the view's writes: the middleware stores the response after"
        " the application has answered. [When can my code actually run twice?](https://github.com/"
        "idemkit/idemkit/blob/main/python/README.md#when-can-my-code-actually-run-twice) names a view"
        " longer than its lease (30 s, not renewed), a lost completion, and responses other than 200,"
        " 201 and 202. Replays keep nine response headers; bodies over 1 MiB are not protected. The"
        " local cache helps only in the process that ran the request.",
    ),
    "idempot": Package(
        ("idempot[flask]==1.0.0",),
        'Its README, "How It Works": a lock of 5 seconds in Redis, then the view, then the response in'
        " Redis. No transaction with the view's writes; no comparison of requests (“different body,"
        " ignored”); no scope by user. The lock is released without asking who holds it.",
    ),
    "pyidempotent": Package(
        ("pyidempotent[redis]==0.1.0",),
        'Its README, "How it works": the key is set for 24 hours, then the function runs, then its'
        " result is set. No transaction with its writes; no scope; no status or headers. Nothing ends"
        " the claim of a worker that died before the 24 hours are over.",
    ),
    "powertools": Package(
        ("aws-lambda-powertools[redis,aws-sdk]==3.37.0",),
        "One transaction for the record and the function's writes; scope by user; status and headers:"
        " it protects functions. [Lambda timeouts](https://docs.aws.amazon.com/powertools/python/latest/"
        "utilities/idempotency/#lambda-timeouts): without a registered Lambda context, a call that did"
        " not finish is refused until its record expires, by default after an hour. The local cache"
        " helps only in the process that ran the request.",
    ),
    "dbos": Package(
        ("dbos==3.4.0",),
        "[Idempotency](https://docs.dbos.dev/python/tutorials/idempotency-tutorial) is by workflow id"
        " alone: no comparison of requests, no scope, no HTTP response. A transaction commits with its"
        " own checkpoint, the workflow's result is stored later. [A crashed executor's workflows]("
        "https://docs.dbos.dev/production/workflow-recovery) wait until it restarts under the same id,"
        " or for the Conductor service.",
    ),
}


@dataclass(frozen=True)
class Contender:
    """One way to use a package: the file in ``apps`` and its options.

    ``crash`` it as well, unless another contender shows the same.
    """

    package: str
    app: str
    options: Mapping[str, Any] = field(default_factory=dict)
    crash: bool = True


CONTENDERS = {
    "ours, `hybrid`": Contender("ours", "ours", {"store": "hybrid"}),
    "ours, `postgres`": Contender("ours", "ours", {"store": "postgres"}),
    "ours, `postgres`, one atomic step": Contender(
        "ours", "ours", {"store": "postgres", "atomic": False, "step": True}
    ),
    "ours, `redis`": Contender("ours", "ours", {"store": "redis", "atomic": False}),
    "idemkit, Redis": Contender("idemkit", "idemkit_wsgi", {"backend": "redis"}),
    "idemkit, Redis, local cache": Contender(
        "idemkit", "idemkit_wsgi", {"backend": "redis", "local_cache": True}, crash=False
    ),
    "idemkit, Postgres": Contender("idemkit", "idemkit_wsgi", {"backend": "postgres"}),
    "idempot[flask]": Contender("idempot", "idempot_flask"),
    "idempot, kept event loop": Contender("idempot", "idempot_flask", {"kept_loop": True}, crash=False),
    "pyidempotent": Contender("pyidempotent", "pyidempotent_redis"),
    "pyidempotent, kept event loop": Contender(
        "pyidempotent", "pyidempotent_redis", {"kept_loop": True}, crash=False
    ),
    "powertools, validation": Contender("powertools", "powertools"),
    "powertools, validation, local cache": Contender(
        "powertools", "powertools", {"local_cache": True}, crash=False
    ),
    "powertools, no validation": Contender("powertools", "powertools", {"validate": False}),
    "dbos, datasource": Contender("dbos", "dbos_workflow"),
}
"""By the name in the tables. "Kept event loop" is not the package's documented use: with that, every
second request fails."""
