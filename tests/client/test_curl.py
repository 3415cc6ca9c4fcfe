"""The stand-in for curl does what the real one does, with the options that the pages use."""

from __future__ import annotations

import subprocess

import pytest

from tests import curl
from tests.client.conftest import break_off, drop_before, hang, respond, written

SHOWN = ["--silent", "--show-error"]


@pytest.fixture(params=curl.kinds())
def send(request, server, tmp_path):
    """Runs curl; its exit code, and what it printed on both channels."""
    path = curl.path_with(request.param, tmp_path)

    def run(*options):
        command = ["curl", *options, f"{server.url}/payments"]
        environment = {"PATH": path, "no_proxy": "*"}
        done = subprocess.run(
            ["/bin/sh", "-c", '"$@"', "sh", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_it_sends_what_it_is_told(send, server):
    header = ["--header", "Idempotency-Key: k", "--header", "Content-Type: application/json"]
    assert send(*SHOWN, *header, "--data", '{"amount": 5}') == (0, '{"id": 1}', "")
    [seen] = server.seen
    assert (seen.method, seen.path, seen.key, seen.body) == ("POST", "/payments", "k", b'{"amount": 5}')


def test_it_shows_the_headers_and_writes_what_it_is_asked_for(send, server):
    server.script += [respond(409, "request-in-progress", Retry_After="7")]
    more = r"%{http_code}|%header{retry-after}|%header{idempotent-replayed}\n"
    code, said, trouble = send(*SHOWN, "--include", "--json", "{}", "--write-out", more)
    head, _, rest = said.partition("\n\n")
    assert (code, trouble) == (0, "")
    assert head.splitlines() == [
        "HTTP/1.1 409 Conflict",
        "Content-Length: 61",
        "Content-Type: application/problem+json",
        "Retry-After: 7",
    ]
    assert rest == '{"type": "urn:flask-idempotency:problem:request-in-progress"}409|7|\n'


@pytest.mark.parametrize(
    ("fault", "code", "status", "body", "said"),
    [
        (drop_before, 52, "000", "", "curl: (52) Empty reply from server"),
        (break_off, 18, "201", '{"id":', "curl: (18) "),
        (hang, 28, "000", "", "curl: (28) "),
    ],
)
def test_no_response_and_half_of_one_are_errors(
    send, server, tmp_path, fault, code, status, body, said
):
    server.script += [fault]
    file = tmp_path / "response"
    file.touch()  # the real one makes no file for nothing
    wanted = ["--max-time", "0.5", "--output", str(file), "--write-out", "%{http_code}"]
    got, out, trouble = send(*SHOWN, *wanted)
    assert (got, out, file.read_text("utf-8")) == (code, status, body)
    assert trouble.startswith(said)


def test_a_response_that_breaks_off_before_its_length_is_none(send, server):
    server.script += [written("HTTP/1.1 201 CREATED\r\nServer: gunicorn\r\nContent-Le")]
    more = "%{http_code}|%{http_version}%header{content-length}"
    assert send(*SHOWN, "--write-out", more) == (0, "201|1.1", "")
    server.script += [written("HTTP/1.1 201 CREATED\r\nContent-Length: 2\r\n")]
    assert send(*SHOWN)[0] == 18


def test_a_server_that_is_not_there_is_an_error(send, server):
    server.stop()
    code, out, trouble = send(*SHOWN)
    assert (code, out) == (7, "")
    assert trouble.startswith("curl: (7) ")
