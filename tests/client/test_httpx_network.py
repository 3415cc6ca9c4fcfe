"""The ways from httpx to a server: TLS, proxies, SOCKS, HTTP/2, and processes that were forked."""

from __future__ import annotations

import gc
import json
import ssl
import subprocess
import sys
from contextlib import contextmanager
from threading import Thread

import httpx
import pytest

from flask_idempotency.client import was_replayed
from tests.certificates import self_signed
from tests.client import http2, proxies
from tests.client.conftest import drop_after, respond

KEY = "Idempotency-Key"


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "own.pem"
    path.write_bytes(self_signed())
    return path


@pytest.fixture
def trusted(certificate):
    """What a client's ``verify`` is, so that it trusts our certificate."""
    return ssl.create_default_context(cafile=certificate)


@pytest.fixture
def tls(certificate):
    """What a server needs for TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def secure(stopped, tls):
    """The server, with TLS."""
    stopped.start(tls)
    stopped.url = stopped.url.replace("http:", "https:")
    return stopped


class TestTls:
    def test_a_lost_response_is_asked_for_again(self, kind, secure, trusted):
        secure.script += [drop_after]
        response = kind.post(kind.client(verify=trusted), secure.url)
        assert was_replayed(response)
        assert secure.keys == [response.request.headers[KEY]] * 2

    def test_a_certificate_that_is_not_trusted_is_final(self, kind, secure, time):
        with pytest.raises(httpx.ConnectError):
            kind.post(kind.client(), secure.url)
        assert time.waits == []


class TestProxies:
    def test_a_lost_response_is_asked_for_again_through_the_same_tunnel(self, kind, secure, trusted):
        secure.script += [drop_after]
        with proxies.running(proxies.Connect) as proxy:
            client = kind.client(proxy=f"http://{proxy.address}", verify=trusted)
            assert was_replayed(kind.post(client, secure.url))
        assert len(proxy.seen) == 2
        assert len(set(secure.keys)) == 1

    def test_the_way_to_the_proxy_may_be_encrypted_as_well(
        self, kind, secure, trusted, tls, certificate, monkeypatch
    ):
        monkeypatch.setattr(
            "certifi.where", lambda: str(certificate)
        )  # whom httpcore trusts as a proxy
        secure.script += [drop_after]
        with proxies.running(proxies.Connect) as proxy:
            proxy.socket = tls.wrap_socket(proxy.socket, server_side=True)
            client = kind.client(proxy=f"https://{proxy.address}", verify=trusted)
            assert was_replayed(kind.post(client, secure.url))
        assert len(proxy.seen) == 2

    @pytest.mark.parametrize(
        ("refusal", "attempts"),
        [("407 Proxy Authentication Required", 1), ("403 Forbidden", 1), ("502 Bad Gateway", 4)],
    )
    def test_one_that_refuses_for_good_is_final(self, kind, time, refusal, attempts):
        with proxies.running(proxies.Connect, refusal) as proxy:
            options = {"proxy": f"http://{proxy.address}", "policy": time.policy(retries=3)}
            with pytest.raises(httpx.ProxyError) as lost:
                kind.post(kind.client(verify=False, **options), "https://api.example.com")
        assert proxy.seen == [("api.example.com", 443)] * attempts
        assert lost.value.request.headers[KEY]

    def test_a_lost_response_is_asked_for_again_through_socks(self, kind, server):
        server.script += [drop_after]
        with proxies.running(proxies.Socks) as proxy:
            client = kind.client(proxy=f"socks5://{proxy.address}", verify=False)
            assert was_replayed(kind.post(client, server.url))
        assert proxy.seen == [("127.0.0.1", server.port)] * 2

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # httpcore leaves the socket open
    def test_a_socks_proxy_that_lets_nobody_in_is_final(self, kind, time, collect):
        with proxies.running(proxies.Socks, "nobody") as proxy:
            client = kind.client(proxy=f"socks5://{proxy.address}", verify=False)
            with pytest.raises(httpx.ProxyError, match="Requested .* from proxy server"):
                kind.post(client, "http://api.example.com")
        assert time.waits == []

    @pytest.fixture
    def collect(self, kind):
        yield
        gc.collect()


class TestFinalErrors:
    @pytest.mark.parametrize("url", ["ftp://api.example.com", "//api.example.com"])
    def test_an_unknown_protocol_is_final(self, kind, time, url):
        with pytest.raises(httpx.UnsupportedProtocol):
            kind.post(kind.client(verify=False), url)
        assert time.waits == []

    def test_a_sign_in_with_a_wrong_password_is_final(self, kind, client, server):
        challenge = respond(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')
        server.script += [challenge] * 3
        auth = httpx.DigestAuth("alice", "no")
        assert kind.run(client.post, server.url, auth=auth).status_code == 401
        assert len(server.seen) == 2

    def test_a_policy_can_name_more_for_each_of_a_hosts_addresses(self, kind, time, stopped):
        """Where a host has several, the event loops put their errors into a group."""
        options = {"policy": time.policy(permanent=(ConnectionRefusedError,)), "verify": False}
        with pytest.raises(httpx.ConnectError):
            kind.post(kind.client(**options), f"http://localhost:{stopped.port}")
        assert time.waits == []


@contextmanager
def running():
    with http2.Http2Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class TestHttp2:
    @pytest.fixture
    def server(self):
        with running() as server:
            yield server

    @pytest.mark.parametrize(
        "trouble", [http2.refuse, http2.break_off, http2.go_away, http2.respond(503)]
    )
    def test_a_call_without_a_final_response_is_sent_again(self, kind, server, trouble):
        server.script += [trouble]
        response = kind.post(kind.client(http1=False, http2=True, verify=False), server.url)
        assert (response.status_code, response.http_version) == (201, "HTTP/2")
        assert server.keys == [response.request.headers[KEY]] * 2


FORKED = """
import json, os, sys
from flask_idempotency.client import IdempotentClient

def post():
    with IdempotentClient(verify=False, trust_env=False) as client:
        return client.post(sys.argv[1]).request.headers["Idempotency-Key"]

keys = [post()]
reading, writing = os.pipe()
if not os.fork():
    os.write(writing, post().encode())
    os._exit(0)
os.wait()
keys += [post(), os.read(reading, 100).decode()]
print(json.dumps(keys))
"""


def test_a_client_that_is_made_after_the_fork_has_keys_of_its_own(server):
    command = [sys.executable, "-c", FORKED, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(set(json.loads(done.stdout))) == 3
    assert set(server.keys) == set(json.loads(done.stdout))
