"""A throwaway Redis (or Valkey) server."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import redis

from servers.find import find_redis
from servers.process import Server, Setting


class Redis(Server):
    """An empty Redis; one that is not ``persistent`` forgets everything when it ends."""

    kind = "redis"

    def __init__(
        self,
        *,
        persistent: bool = False,
        settings: Mapping[str, Setting] | None = None,
        port: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._program = find_redis()
        self._persistent = persistent
        super().__init__(settings=settings, port=port, timeout=timeout)

    @property
    def url(self) -> str:
        """Database 0: ``redis://…``."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _prepare(self) -> None:
        copies = self.folder / "programs"
        if not copies.exists():
            self._program = self._account.reachable(self._program, [self._program], copies)

    def _command(self) -> list[str]:
        settings: dict[str, Setting] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "unixsocket": self.data / "redis.sock",
            "unixsocketperm": 700,
            "requirepass": self.password,
            "dir": self.data,
            "save": "",
            "appendonly": "yes" if self._persistent else "no",
            "appendfsync": "always",
            **self.settings,
        }
        # A file: a password among arguments shows in `ps`. In its folder, as a Sentinel writes it anew.
        config = self.data / "redis.conf"
        self._account.write(config, "".join(f'{key} "{value}"\n' for key, value in settings.items()))
        return [str(self._program), str(config)]

    def _ping(self) -> bool:
        path = str(self.data / "redis.sock")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path):  # redis-py before 5.1 leaves such a socket open
                return False
        client = redis.Redis(
            unix_socket_path=path, password=self.password, socket_timeout=2, protocol=2
        )
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):  # the first also while it loads
            return False
        finally:
            client.close()
