"""nginx in front of the shop, which sends a request to the next master when one is slow or fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scale.masters import Master
from scale.programs import Program, program

READ_SECONDS = 1  # until a master counts as silent


class NGINX(Program):
    """Sends requests to several masters in turn, and again to the next if one fails or is slow."""

    kind = "nginx"

    def __init__(self, masters: Sequence[Master]) -> None:
        super().__init__()
        self.masters = masters
        self.url = f"http://127.0.0.1:{self.port}"

    def _configuration(self) -> str:
        # max_fails=0: a master that failed is asked again at once, so more is sent twice.
        masters = "\n".join(f"    server 127.0.0.1:{each.port} max_fails=0;" for each in self.masters)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "\n".join(f"  {kind}_temp_path {self.data}/{kind};" for kind in kinds)
        return f"""
daemon off;
worker_processes 1;
pid {self.data}/nginx.pid;
error_log stderr crit;
events {{ worker_connections 512; }}
http {{
{folders}
  log_format tries '$request_method $status $upstream_status';
  access_log {self._tries} tries;
  upstream shop {{
{masters}
  }}
  server {{
    listen 127.0.0.1:{self.port};
    location / {{
      proxy_pass http://shop;
      proxy_connect_timeout {READ_SECONDS}s;
      proxy_read_timeout {READ_SECONDS}s;
      proxy_next_upstream error timeout http_500 http_502 http_503 http_504 non_idempotent;
    }}
  }}
}}
"""

    def _command(self) -> list[str]:
        return [program("nginx"), "-p", str(self.data), "-e", "stderr", "-c", str(self.config)]

    @property
    def _tries(self) -> Path:
        return self.data / "tries.log"

    def counts(self) -> dict[str, int]:
        """How many requests nginx has sent to more than one master, and what came of these.

        Of ``POST 201 504, 201`` the last three are the response and what each master gave.
        """
        found = {"sent again by nginx": 0, "of these 201": 0}
        with self._tries.open() as lines:
            for line in lines:
                method, status, *tries = line.split()
                if method == "POST" and len(tries) > 1:
                    found["sent again by nginx"] += 1
                    found["of these 201"] += status == "201"
        return found
