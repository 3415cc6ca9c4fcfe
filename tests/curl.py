"""A stand-in for ``curl``, for machines that have none: what the commands on the pages need of it.

A bare machine has none, and all tests run there. Run as a program it takes the options of these
commands, and refuses any other.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from pathlib import Path
from urllib.parse import urlsplit

HEADERS_BY_NAME = (7, 84)
"""The version that knows ``--write-out '%header{name}'``, which a page uses."""


@cache
def real_curl() -> str | None:
    """The folder of the machine's own curl; None if there is none, or an old one."""
    if (program := shutil.which("curl")) is None:
        return None
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(number) for number in said.split()[1].split(".")[:2])
    return str(Path(program).parent) if version >= HEADERS_BY_NAME else None


def path_with_curl(folder: Path) -> str:
    """A ``PATH`` with the machine's own curl, or with a stand-in that is made in the folder."""
    return f"{real_curl() or _stand_in(folder)}{os.pathsep}{os.environ['PATH']}"


def _stand_in(folder: Path) -> str:
    program = folder / "bin/curl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    return str(program.parent)


def main(arguments: Sequence[str]) -> int:
    """Send one request. Returns curl's exit code."""
    parser = argparse.ArgumentParser("curl", allow_abbrev=False)
    parser.add_argument("url")
    for flag in ("--silent", "--show-error", "--include"):
        parser.add_argument(flag, action="store_true")
    for option in ("--request", "--data", "--json", "--output", "--write-out"):
        parser.add_argument(option)
    parser.add_argument("--max-time", type=float)
    parser.add_argument("--header", action="append", default=[])
    asked = parser.parse_args(arguments)
    out = open(asked.output, "wb") if asked.output else sys.stdout.buffer  # noqa: PTH123, SIM115
    code, trouble, response = 0, "", None
    try:
        response = _send(asked)
        if asked.include:
            lines = [f"HTTP/1.1 {response.status} {response.reason}"]
            lines += [f"{name}: {value}" for name, value in response.getheaders()]
            out.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        out.write(response.read())
    except RemoteDisconnected:
        code, trouble = 52, "Empty reply from server"
    except IncompleteRead as error:
        out.write(error.partial)
        code, trouble = 18, f"transfer closed with {error.expected} bytes remaining to read"
    except TimeoutError:
        code, trouble = 28, "Operation timed out"
    except (OSError, HTTPException) as error:
        code, trouble = 7, f"Failed to connect to server: {error}"
    out.flush()
    sys.stdout.write(_written_out(asked.write_out or "", response))
    sys.stdout.flush()
    if code and (asked.show_error or not asked.silent):
        sys.stderr.write(f"curl: ({code}) {trouble}\n")
    return code


def _send(asked: argparse.Namespace) -> HTTPResponse:
    url = urlsplit(asked.url)
    body = asked.data if asked.json is None else asked.json
    headers = {"Accept": "*/*", "User-Agent": "curl"}
    if body is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    if asked.json is not None:
        headers |= dict.fromkeys(("Content-Type", "Accept"), "application/json")
    for line in asked.header:
        name, _, value = line.partition(":")
        headers[name] = value.strip()
    connection = HTTPConnection(url.hostname or "", url.port, timeout=asked.max_time)
    method = asked.request or ("GET" if body is None else "POST")
    connection.request(
        method, url._replace(scheme="", netloc="").geturl() or "/", body and body.encode(), headers
    )
    return connection.getresponse()


def _written_out(text: str, response: HTTPResponse | None) -> str:
    def value(found: re.Match[str]) -> str:
        if found["header"]:
            return response.getheader(found["header"], "") if response else ""
        if found["variable"] == "http_version":
            return f"{response.version / 10}" if response else "0"
        return f"{response.status if response else 0:03}"

    names = r"%header\{(?P<header>[\w-]+)\}|%\{(?P<variable>http_code|http_version)\}"
    return re.sub(names, value, text.replace(r"\n", "\n"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
