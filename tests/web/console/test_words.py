"""The words for times and sizes."""

from datetime import datetime, timedelta, timezone

from flask_idempotency.console.labels import ago, moment, size
from flask_idempotency.operate.words import duration


def test_the_words_for_times():
    assert [duration(each) for each in (0, 59, 60, 3661, 90_000, 86_400 * 3)] == [
        "0 s", "59 s", "1 min", "1 h 1 min", "1 d 1 h", "3 d"]  # fmt: skip
    assert (ago(0.4), ago(90), ago(-90)) == ("now", "1 min 30 s ago", "in 1 min 30 s")
    assert [size(each) for each in (None, 3, 2048, 3 * 1024**2)] == ["–", "3 B", "2.0 KiB", "3.0 MiB"]
    when = datetime(2026, 11, 22, 3, 0, tzinfo=timezone(timedelta(hours=1)))
    shown = moment(when, datetime(2026, 11, 22, 2, 2, tzinfo=timezone.utc))
    assert 'datetime="2026-11-22T02:00:00.000Z"' in shown
    assert "2 min ago" in shown
    assert moment("<infinity>") == "&lt;infinity&gt;"
