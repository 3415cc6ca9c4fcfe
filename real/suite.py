"""One run of a package's suite, in one mode."""

from __future__ import annotations

import json
import os
import subprocess

from sqlalchemy import make_url

from real.comparison import Result
from real.environment import ROOT, Environment
from real.packages import Package

# Their own options may ask for coverage, or for plugins that only their developers have.
PYTEST = ("-m", "pytest", "-q", "-p", "real.plugin", "-p", "no:cacheprovider", "-o", "addopts=")


def run(package: Package, place: Environment, mode: str, database: str, redis_url: str) -> Result:
    """What came of it. What it printed is beside the sources, as is its result.

    Without any test if pytest wrote no result.
    """
    output = place.sources.parent / f"{mode}.txt"
    written = output.with_suffix(".json")
    written.unlink(missing_ok=True)
    urls = {
        "database": database,
        "server": database.rsplit("/", 1)[0],
        "url": make_url(database),
        "redis": make_url(redis_url),
    }
    own = {name: value.format(**urls) for name, value in package.environment}
    ours = {"REAL_MODE": mode, "REAL_RESULT": str(written), "REAL_REDIS": redis_url}
    arguments = [each.format(**urls) for each in package.arguments]
    with output.open("w", encoding="utf-8") as file:
        subprocess.run(
            [place.python, *PYTEST, "-k", package.only, *arguments, *package.tests],
            cwd=place.sources,
            env={**os.environ, **own, **ours, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return Result(**json.loads(written.read_text(encoding="utf-8"))) if written.exists() else Result({})
