"""HAProxy in front of Patroni's nodes, as Patroni's documentation has it."""

from __future__ import annotations

from collections.abc import Sequence

from scale.patroni import Node
from scale.programs import Program, program

CHECK_SECONDS = 1


class HAProxy(Program):
    """Passes connections on to the node that leads, and ends them when it leads no longer."""

    kind = "haproxy"

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nodes = nodes

    def _configuration(self) -> str:
        nodes = "\n".join(
            f"  server {each.name} 127.0.0.1:{each.port} check port {each.rest}" for each in self.nodes
        )
        return f"""
defaults
  mode tcp
  timeout connect 2s
  timeout client 30m
  timeout server 30m
  timeout check {CHECK_SECONDS}s
listen primary
  bind 127.0.0.1:{self.port}
  option httpchk OPTIONS /primary
  http-check expect status 200
  default-server inter {CHECK_SECONDS}s fall 2 rise 1 on-marked-down shutdown-sessions
{nodes}
"""

    def _command(self) -> list[str]:
        return [program("haproxy"), "-db", "-f", str(self.config)]
