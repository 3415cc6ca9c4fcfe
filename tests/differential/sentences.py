"""What ``docs/guarantees.md`` says of each difference by design (case and quotes do not count)."""

ROLLED_BACK = "a commit that is followed by an error is rolled back with the operation"
KEPT = "the client gets a 500 and a retry gets the stored response"
CLOCK = "now() and the transaction ID stay the same across the view's commits"
SNAPSHOT = "the snapshot of REPEATABLE READ and SERIALIZABLE stays the same across the view's commits"
UNSEEN = "what the view commits is not visible to other connections before the operation ends"
HELD = "row locks and advisory transaction locks are held until the operation ends"
NOTIFIED = "NOTIFY arrives when the operation ends"
UNRELEASED = "after the end of a begin_nested() failed, a rollback of the one around it works"
SECOND_COMMIT = "after a commit that failed, the next one raises InvalidRequestError"
BY_CLASS = (
    "the next may raise InFailedSqlTransaction in place of an error of its own, and stream_results"
)
DEFERRED = "so does SET CONSTRAINTS, and what only the view defers is asked at the end"
