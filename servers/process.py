"""One server process with its own folder: start, stop, kill -9, pause, resume, restart.

The folder is ours: nobody else can put a link where we write, or processes on the list of those to end.
In it the server has one of its own, ``data``. As root we write nothing there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from servers.account import CLEAN_ENV, Account
from servers.errors import Unavailable
from servers.find import free_port
from servers.watchdog import Watchdog

if TYPE_CHECKING:
    from typing_extensions import Self

Setting = str | int | float | Path

_STOP_SECONDS = 10.0  # after that a clean stop becomes a kill -9
_LONGEST_PARENT = 50  # a unix socket's whole path may have 104 bytes
_OTHER_PORTS = 5  # tries: another process may take the free port before the server does


class Server(ABC):
    """A server of our own. The constructor does not start it; ``with`` does, and closes it."""

    kind: str
    controllable = True
    stop_signal = signal.SIGTERM

    def __init__(
        self,
        *,
        settings: Mapping[str, Setting] | None = None,
        port: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.settings = dict(settings or {})
        self.port = port or free_port()
        self.timeout = timeout
        self.password = secrets.token_urlsafe(12)
        self._port_is_fixed = port is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False
        self._closed = False
        self._owner = os.getpid()
        self._account = Account()
        self.folder = Path(tempfile.mkdtemp(prefix=f"throwaway-{self.kind}-", dir=self._parent()))
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        self._account.own(self.data)
        if self._account.is_other:
            self.folder.chmod(0o711)  # it must get to what is its own
        self._watchdog = Watchdog(self.folder, self._account.words)
        atexit.register(self.close)

    def _parent(self) -> str:
        """Where the folder goes: the other account may not reach one's own TMPDIR."""
        usual = tempfile.gettempdir()
        too_long = len(usual) > _LONGEST_PARENT
        return "/tmp" if self._account.is_other or too_long else usual  # noqa: S108

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the server needs before its first start; called before every start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line, on the port of the moment."""

    @abstractmethod
    def _ping(self) -> bool:
        """Whether the server answers."""

    def _clear_traces(self) -> None:  # noqa: B027 - most kinds leave none
        """Remove what a killed server leaves outside its folder."""

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def log(self) -> str:
        """All that the server has printed."""
        file = self.folder / "server.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self) -> Self:
        """Start it on its port with the data it had; returns when it answers.

        Raises:
            Unavailable: it ended, or gave no answer in ``timeout`` seconds; with the log's end.
        """
        if self.pid is not None:
            return self
        self._prepare()
        failure = self._start_once()
        may_move = not (self._was_ready or self._port_is_fixed)
        for _ in range(_OTHER_PORTS if may_move else 0):
            if failure is None or "ddress already in use" not in failure:
                break
            self.port = free_port()
            failure = self._start_once()
        if failure is not None:
            raise Unavailable(f"{self.kind} did not start: {failure}")
        self._was_ready = True
        return self

    def _start_once(self) -> str | None:
        """Start the process and wait for its first answer; what it said when none came."""
        already_said = len(self.log)
        with open(self.folder / "server.log", "ab", opener=_for_us) as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.data,
                env=CLEAN_ENV,
                start_new_session=True,  # the terminal's Ctrl-C is not for it
                **self._account.identity,
            )
        self._watchdog.note([self._process.pid])
        deadline = time.monotonic() + self.timeout
        while self.pid is not None and time.monotonic() < deadline:
            if self._ping():
                return None
            time.sleep(0.01)
        self.kill()
        return self.log[already_said:][-2000:] or "it said nothing"

    def stop(self) -> None:
        """A clean stop; the data stays."""
        if self._process is None or self.pid is None:
            return
        self.resume()
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._watchdog.note([])

    def kill(self) -> None:
        """End all its processes with kill -9; when it returns they are dead, so it may start."""
        family = self._freeze()  # a stopped parent has no more children
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait(_STOP_SECONDS)
        deadline = time.monotonic() + _STOP_SECONDS
        while any(map(_is_alive, family)) and time.monotonic() < deadline:
            time.sleep(0.002)
        self._watchdog.note([])

    def pause(self) -> None:
        """SIGSTOP to all its processes: connections stay up, also new ones, nothing answers."""
        self._watchdog.note(process.pid for process in self._freeze())

    def resume(self) -> None:
        """Go on after ``pause``."""
        for process in reversed(self._family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def restart(self, *, crash: bool = False) -> Self:
        """Same port, same data. ``crash``: kill -9 instead of a clean stop."""
        if crash:
            self.kill()
        else:
            self.stop()
        return self.start()

    def close(self) -> None:
        """Stop it and remove every trace. Runs at exit too; does nothing in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.stop()
        self._clear_traces()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._watchdog.close()

    def _family(self) -> list[psutil.Process]:
        """Its own process first, then the children; killpg would miss PostgreSQL's backends."""
        if self.pid is None:
            return []
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def _freeze(self) -> list[psutil.Process]:
        """SIGSTOP the parent, then its children until no new one shows up."""
        frozen: list[psutil.Process] = []
        while fresh := [process for process in self._family() if process not in frozen]:
            for process in fresh:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            frozen += fresh
        return frozen

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


def _for_us(path: str, flags: int) -> int:
    """Open a file that only we may read: statements hold passwords."""
    return os.open(path, flags, 0o600)


def _is_alive(process: psutil.Process) -> bool:
    """Zombies count as dead: in a container nobody may ever reap them."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
