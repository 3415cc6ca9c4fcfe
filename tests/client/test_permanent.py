"""An error that every attempt would meet again ends the call at once."""

from __future__ import annotations

import gc
import socket
import ssl

import pytest
import requests
from requests.auth import HTTPDigestAuth
from requests.exceptions import InvalidURL, ProxyError, TooManyRedirects

from flask_idempotency.client import IdempotentSession
from tests.client import proxies
from tests.client.conftest import LOST, drop_before, respond


@pytest.fixture
def unresolved(monkeypatch):
    """A function that lets every host's name fail to resolve."""

    def fail(code):
        def getaddrinfo(*_args, **_kwargs):
            raise socket.gaierror(code, "no address")

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return fail


class TestEachClient:
    @pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
    def test_an_unknown_host_is_final(self, call, time, unresolved, code):
        unresolved(code)
        with pytest.raises(LOST):
            call("POST", "http://api.example.com")
        assert time.waits == []

    def test_a_name_server_that_does_not_respond_is_asked_again(self, make_caller, time, unresolved):
        unresolved(socket.EAI_AGAIN)
        with pytest.raises(LOST):
            make_caller(retries=2)("POST", "http://api.example.com")
        assert len(time.waits) == 2

    def test_a_policy_can_name_more(self, make_caller, time, stopped):
        with pytest.raises(LOST):
            make_caller(permanent=(ConnectionRefusedError,))("POST", stopped.url)
        assert time.waits == []

    def test_an_error_that_the_caller_handles_has_nothing_to_do_with_it(self, call, server):
        server.script += [drop_before]
        try:
            raise ssl.SSLCertVerificationError
        except ssl.SSLCertVerificationError:
            assert call("POST", server.url).status == 201


class TestSession:
    """What requests has of its own."""

    @pytest.fixture
    def session(self, time):
        with IdempotentSession(time.policy(retries=3)) as session:
            session.trust_env = False
            yield session

    @pytest.mark.parametrize(
        ("refusal", "attempts"),
        [
            ("407 Proxy Authentication Required", 1),
            ("403 Forbidden", 1),
            ("429 Too Many Requests", 4),
            ("502 Bad Gateway", 4),
        ],
    )
    @pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
    def test_a_proxy_that_refuses_for_good_is_final(self, session, refusal, attempts):
        with proxies.running(proxies.Connect, refusal) as proxy:
            through = {"https": f"http://{proxy.address}"}
            with pytest.raises(ProxyError) as lost:
                session.post("https://api.example.com", proxies=through)
        assert proxy.seen == [("api.example.com", 443)] * attempts
        assert lost.value.request.headers["Idempotency-Key"]
        del lost
        gc.collect()  # Python 3.10 leaves a refused tunnel open until then

    def test_a_socks_proxy_that_lets_nobody_in_is_final(self, session, time):
        with proxies.running(proxies.Socks, "nobody") as proxy:
            through = {"http": f"socks5://{proxy.address}"}
            with pytest.raises(requests.ConnectionError, match="methods were rejected"):
                session.post("http://127.0.0.1", proxies=through)
        assert time.waits == []

    def test_a_sign_in_with_a_wrong_password_is_final(self, server, session):
        challenge = respond(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')
        server.script += [challenge] * 3
        assert session.post(server.url, auth=HTTPDigestAuth("alice", "no")).status_code == 401
        assert len(server.seen) == 2

    def test_a_circle_of_redirects_is_followed_once(self, server, session):
        session.max_redirects = 2
        server.script += [respond(307, Location="/")] * 9
        with pytest.raises(TooManyRedirects) as lost:
            session.post(server.url)
        assert len(server.seen) == 3
        assert lost.value.request.headers["Idempotency-Key"] == server.keys[0]

    @pytest.mark.parametrize("url", ["http://", "http://*.example.com"])
    def test_a_wrong_address_is_final(self, session, time, url):
        with pytest.raises(InvalidURL):
            session.post(url)
        assert time.waits == []
