"""Run the few tests that have just failed three times more, each time alone.

A test that fails beside ten thousand others and then passes three times is named, so that it is mended
next, and keeps no change out. One that shows a promise is not excused: a race may be just that rare.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
PROMISES = ("tests/contract", "tests/faults", "tests/external", "tests/recipes")

cache = Path(".pytest_cache/v/cache/lastfailed")
failed = sorted(json.loads(cache.read_text())) if cache.exists() else []
if not failed or len(failed) > MOST or any(name.startswith(PROMISES) for name in failed):
    sys.exit(1)
for _ in range(3):
    if subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", *failed], check=False
    ).returncode:
        sys.exit(1)
said = "== UNSTABLE, failed once and passed three times alone; to be mended:"
sys.stdout.write("\n".join([said, *failed, ""]))
