"""The purge without a person: after some responses a few expired records are deleted.

The response has been sent by then, so no client waits. There is no request any more, and no context of
the application: listeners that need one fail here, and that is logged.
"""

from __future__ import annotations

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.logs import log
from flask_idempotency.core.ports import Records

MOST = 100
"""How many records go at once: twice as many as have come meanwhile, so that older ones go, too."""


class Purge:
    """Called after a response, deletes a batch of expired ``records``. One for each process."""

    every = 50  # after one in so many first requests

    def __init__(self, records: Records) -> None:
        self._admin, self.batch = records.admin(), MOST

    def __call__(self) -> None:
        """Delete a batch. What goes wrong is logged, and nobody's error.

        The next batch is half of it if this one took too long, as of large responses.
        """
        deleted: int | None = 0
        try:
            deleted = self._admin.purge_briefly(self.batch)
        except StoreUnavailable as error:
            log.warning("expired records are deleted later: %r", error.__cause__ or error)
        except Exception:
            log.exception("expired records could not be deleted")
        if deleted:
            self.batch = min(MOST, 2 * self.batch)
        elif deleted is None:
            self.batch = max(1, self.batch // 2)
            log.warning("deleting expired records took too long; next time %d go at once", self.batch)
