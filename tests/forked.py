"""Programs in processes forked from one that has imported them: most of a start is imports."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [f"tests.integration.apps.{name}" for name in ("copied_claim", "forking_shop", "orphan")]
)

_numbers = itertools.count(1)


class Program:
    """A function in a process that leads a group of its own; what it writes goes into a folder."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], main: Callable[..., None], *arguments: Any
    ) -> None:
        number = next(_numbers)
        self._output, self._errors = folder / f"output-{number}", folder / f"errors-{number}"
        given = (self._output, self._errors, dict(environment), main, *arguments)
        self.process = PROCESSES.Process(target=_run, args=given)
        self.process.start()

    def lines(self) -> list[str]:
        """The whole lines that it has written."""
        written = self._output.read_text(encoding="utf-8") if self._output.exists() else ""
        return [line for line in written.splitlines(keepends=True) if line.endswith("\n")]

    def errors(self) -> str:
        return self._errors.read_text(encoding="utf-8")

    def end(self) -> None:
        """Kill it, with children that have outlived it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


def _run(
    output: Path, errors: Path, environment: dict[str, str], main: Callable[..., None], *arguments: Any
) -> None:
    os.setsid()
    for path, descriptor in (output, 1), (errors, 2):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    main(*arguments)
