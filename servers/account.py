"""Whom the servers run as: oneself, or an unprivileged account when one is root.

PostgreSQL refuses to run as root, and a throwaway Redis has no need to.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from servers.errors import Unavailable

# No stray PGPORT, PGDATA, LD_PRELOAD … from the owner's environment.
CLEAN_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": "/"}


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class Account:
    """The account of the server processes and of their files."""

    def __init__(self) -> None:
        self._entry = _unprivileged() if os.geteuid() == 0 else None

    @property
    def identity(self) -> _Identity:
        """Arguments of ``subprocess.Popen``; ``user`` alone would keep root's groups."""
        if self._entry is None:
            return {}
        return {"user": self._entry.pw_uid, "group": self._entry.pw_gid, "extra_groups": []}

    @property
    def is_other(self) -> bool:
        """Whether it is not the account of this process."""
        return self._entry is not None

    @property
    def words(self) -> list[str]:
        """What stands before a command of a shell that is to run as the account. Linux only."""
        if self._entry is None:
            return []
        ids = f"--reuid={self._entry.pw_uid}", f"--regid={self._entry.pw_gid}"
        return ["setpriv", *ids, "--clear-groups"]

    def own(self, path: Path) -> None:
        """Give a file, or a folder with all in it, to the account.

        The folder comes last: before, it is closed to the account, which could exchange what is in it.
        """
        if self._entry is not None:
            for item in (*path.rglob("*"), path):
                os.chown(item, self._entry.pw_uid, self._entry.pw_gid, follow_symlinks=False)

    def write(self, path: Path, text: str) -> None:
        """Write a file into a folder of the account, as the account, which alone may read it.

        Root itself would follow a link that a process of the account has put in its place.
        """
        script = 'umask 077; rm -f "$0"; cat >"$0"'
        done = self.run(["/bin/sh", "-c", script, path], Path("/"), text)
        if done.returncode:
            raise Unavailable(f"{path} cannot be written: {done.stderr}")

    def run(
        self, command: Sequence[str | Path], folder: Path, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end as the account; it reads ``text``."""
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            check=False,
            text=True,
            cwd=folder,
            env=CLEAN_ENV,
            **self.identity,
        )

    def reachable(self, program: Path, needs: Sequence[Path], copies: Path) -> Path:
        """The program itself, or a copy where the account may not reach it.

        A virtual environment below a folder of mode 0700, such as /root, is out of its reach.

        Args:
            program: the file to run.
            needs: the files and trees to copy with it; they keep their places to each other.
            copies: the folder for the copies.
        """
        try:
            done = self.run([program, "--version"], Path("/"))
        except PermissionError:
            top = Path(os.path.commonpath([need.parent for need in needs]))
            copies.mkdir(mode=0o700)
            for need in needs:
                target = copies / need.relative_to(top)
                target.parent.mkdir(parents=True, exist_ok=True)
                if need.is_dir():
                    shutil.copytree(need, target, symlinks=True)
                else:
                    shutil.copy(need, target)
            self.own(copies)
            return copies / program.relative_to(top)
        except OSError as error:
            raise Unavailable(f"{program} does not run: {error}") from error
        if done.returncode:
            raise Unavailable(f"{program} does not run: {done.stderr}")
        return program


def _unprivileged() -> pwd.struct_passwd:
    """The first that exists of: the one ``SERVERS_USER`` names, postgres, nobody."""
    for name in (os.environ.get("SERVERS_USER"), "postgres", "nobody"):
        if name:
            try:
                return pwd.getpwnam(name)
            except KeyError:
                continue
    raise Unavailable("running as root, and there is neither a 'postgres' nor a 'nobody' account")
