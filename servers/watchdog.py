"""Cleans up when the owner of a server dies without a chance to (kill -9, a CI time-out)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

# "cat" ends when the pipe does, that is when its only other holder, the owner, is gone. $1 is the
# server's folder; $1/pids the processes to end, the server's own first. QUIT lets PostgreSQL remove
# its System V segment; had it been killed before, the segment is named in postmaster.pid, line 7: in a
# file of the account's, so that what follows $1, if anything, removes it as the account.
_SCRIPT = """
cat >/dev/null
folder=$1; shift
pids=$(cat "$folder/pids" 2>/dev/null)
if [ -n "$pids" ]; then
  kill -CONT $pids; kill -QUIT ${pids%% *}
  for i in 1 2 3 4 5 6 7 8 9 10; do kill -0 ${pids%% *} || break; sleep 0.3; done
  kill -KILL $pids
fi 2>/dev/null
segment=$("$@" sed -n '7s/.* //p' "$folder/data/postmaster.pid" 2>/dev/null)
[ -n "$segment" ] && "$@" ipcrm -m "$segment" 2>/dev/null
case "$folder" in */throwaway-*) rm -rf "$folder";; esac
"""


_REMOVAL_SECONDS = 60
"""For the folder of a server with hundreds of databases, on a slow disk."""


class Watchdog:
    """A small shell beside the owner that waits for the owner's end.

    ``words`` stand before a command that is to run as the account of the server.
    """

    def __init__(self, folder: Path, words: Sequence[str] = ()) -> None:
        self._pids = folder / "pids"
        read_end, self._lifeline = os.pipe()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "watchdog", str(folder), *words],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        os.close(read_end)
        # A fork that outlives the owner's close() would keep the pipe open, and the shell waiting.
        os.register_at_fork(after_in_child=self._let_go)

    def note(self, pids: Iterable[int]) -> None:
        """The processes to end, the server's own first; none when it has ended."""
        self._pids.write_text(" ".join(map(str, pids)))

    def close(self) -> None:
        """Let it end; the folder must be gone by now, or it is removed here."""
        self._let_go()
        self._shell.wait(_REMOVAL_SECONDS)

    def _let_go(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
