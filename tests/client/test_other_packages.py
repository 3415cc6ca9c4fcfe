"""requests with what users plug in: mocks, adapters, proxies, signatures, other sessions, processes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import os
import ssl
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
import requests_mock
import responses
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from requests_oauthlib import OAuth1, OAuth2Session
from requests_toolbelt import MultipartEncoder, MultipartEncoderMonitor
from requests_toolbelt.adapters.source import SourceAddressAdapter
from requests_toolbelt.adapters.ssl import SSLAdapter

from flask_idempotency.client import (
    IdempotentAdapter,
    IdempotentSession,
    RetryPolicy,
    attempts_of,
    limit_retries,
    was_replayed,
)
from tests.certificates import self_signed
from tests.client import proxies
from tests.client.conftest import drop_after, drop_before, respond, work

API = "https://api.example.com/payments"


@pytest.fixture
def session(time):
    with IdempotentSession(time.policy()) as session:
        session.trust_env = False
        yield session


@pytest.fixture
def secure(stopped, tmp_path):
    """The URL of a server with TLS, and the certificate to trust."""
    file = tmp_path / "own.pem"
    file.write_bytes(self_signed())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    stopped.start(context)
    return stopped.url.replace("http:", "https:"), str(file)


@pytest.mark.parametrize("kind", [requests.Session, IdempotentSession])
class TestSuitesThatWereThereBefore:
    """What was written for a session of requests passes with ours, word for word."""

    def test_with_responses(self, kind):
        with responses.RequestsMock() as mock, kind() as api:
            api.trust_env = False
            as_given = {"timeout": 10, "verify": True, "stream": False, "cert": None, "proxies": {}}
            mock.post(
                API,
                json={"id": 1},
                status=201,
                match=[
                    responses.matchers.json_params_matcher({"amount": 500}),
                    responses.matchers.request_kwargs_matcher(as_given),
                ],
            )
            assert api.post(API, json={"amount": 500}, timeout=10).json() == {"id": 1}
            mock.post(API, status=307, headers={"Location": f"{API}/there"})
            mock.post(f"{API}/there", body=b"abc" * 1000)
            assert api.post(API, stream=True).content == b"abc" * 1000
            mock.post(f"{API}/wrong", status=422)
            assert api.post(f"{API}/wrong", data={"amount": "5"}).status_code == 422
            mock.add_callback("POST", f"{API}/back", callback=lambda got: (200, {}, got.body))
            assert api.post(f"{API}/back", data=b"abc").content == b"abc"
            assert len(mock.calls) == 5

    @pytest.mark.parametrize("of_session", [False, True])
    def test_with_requests_mock(self, kind, of_session):
        with kind() as api, requests_mock.Mocker(session=api if of_session else None) as mock:
            mock.post(API, json={"id": 1}, status_code=503)
            assert api.post(API, json={"amount": 500}, timeout=10).status_code == 503
            assert mock.call_count == 1
            assert (mock.last_request.json(), mock.last_request.timeout) == ({"amount": 500}, 10)
            mock.post(API, exc=requests.ConnectTimeout)
            with pytest.raises(requests.ConnectTimeout):
                api.post(API)

    def test_with_requests_mock_that_lets_calls_through(self, kind, server):
        with kind() as api, requests_mock.Mocker(real_http=True):
            api.trust_env = False
            assert api.post(server.url).status_code == 201

    def test_a_failure_when_retries_are_switched_off(self, kind):
        with responses.RequestsMock() as mock, kind() as api, limit_retries():
            mock.post(API, status=503)
            assert api.post(API).status_code == 503
            mock.post(f"{API}/lost", body=requests.ReadTimeout())
            with pytest.raises(requests.ReadTimeout):
                api.post(f"{API}/lost")
            assert len(mock.calls) == 2


class TestMocks:
    def test_responses_sees_each_attempt(self, session):
        with responses.RequestsMock() as mock:
            mock.post(API, body=requests.ConnectionError())
            mock.post(API, status=503)
            mock.post(API, status=201)
            assert session.post(API).status_code == 201
            assert len({call.request.headers["Idempotency-Key"] for call in mock.calls}) == 1

    def test_requests_mock_does_so_where_its_adapter_is_mounted(self, session):
        mock = requests_mock.Adapter()
        mock.register_uri("POST", API, [{"exc": requests.ReadTimeout}, {"status_code": 201}])
        session.mount("https://", mock)
        assert session.post(API).status_code == 201
        assert len({seen.headers["Idempotency-Key"] for seen in mock.request_history}) == 1

    def test_with_its_mocker_a_call_has_its_key_and_is_sent_once(self, session):
        with requests_mock.Mocker() as mock:
            mock.post(API, status_code=503)
            assert session.post(API).status_code == 503
            assert mock.last_request.headers["Idempotency-Key"]


class TestToolbelt:
    @pytest.mark.parametrize("monitored", [False, True])
    def test_a_form_that_is_streamed_is_the_same_in_each_attempt(self, server, session, monitored):
        form = MultipartEncoder({"picture": ("a.png", io.BytesIO(b"png"), "image/png")})
        body = MultipartEncoderMonitor(form) if monitored else form
        server.script += [drop_before, respond(503)]
        session.post(server.url, data=body, headers={"Content-Type": body.content_type})
        assert b"png" in server.seen[0].body
        assert server.seen == [server.seen[0]] * 3

    def test_its_adapter_for_a_source_address_keeps_it(self, server, session):
        def note(handler):
            addresses.append(handler.client_address[0])
            work(handler)

        addresses = []
        server.script += [drop_after, note]
        session.mount("http://", SourceAddressAdapter("127.0.0.2"))
        assert was_replayed(session.post(server.url))
        assert addresses == ["127.0.0.2"]

    def test_its_adapter_for_tls_keeps_its_version(self, stopped, secure, session):
        url, certificate = secure
        stopped.script += [drop_after]
        session.mount("https://", SSLAdapter(ssl.PROTOCOL_TLS_CLIENT))
        assert was_replayed(session.post(url, verify=certificate))


class TestProxies:
    def test_a_tunnel_carries_each_attempt(self, stopped, secure, session):
        url, certificate = secure
        stopped.script += [drop_after]
        with proxies.running(proxies.Connect) as proxy:
            through = {"https": f"http://{proxy.address}"}
            assert was_replayed(session.post(url, verify=certificate, proxies=through))
            assert proxy.seen == [("127.0.0.1", stopped.port)] * 2
            session.close()

    @pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
    def test_so_does_a_socks_proxy(self, server, session, scheme):
        server.script += [drop_after]
        with proxies.running(proxies.Socks) as proxy:
            through = {"http": f"{scheme}://{proxy.address}"}
            assert was_replayed(session.post(server.url, proxies=through))
            assert proxy.seen == [("127.0.0.1", server.port)] * 2
            session.close()


class SigV4(AuthBase):
    """Signs as AWS does: the method, the path, some headers, and the digest of the body."""

    def __call__(self, request):
        request.headers["X-Amz-Content-Sha256"] = hashlib.sha256(request.body).hexdigest()
        request.headers["Authorization"] = self.sign(request.method, request.path_url, request.headers)
        return request

    def sign(self, method, path, headers):
        names = ["idempotency-key", "x-amz-content-sha256"]
        lines = [method, path, *(f"{name}:{headers[name]}" for name in names), ";".join(names)]
        return hmac.new(b"secret", "\n".join(lines).encode(), "sha256").hexdigest()


class MessageSignature(AuthBase):
    """Signs as RFC 9421 describes it, with the digest of RFC 9530."""

    INPUT = '("@method" "@path" "content-digest" "idempotency-key");created=1;alg="hmac-sha256"'

    def __call__(self, request):
        digest = base64.b64encode(hashlib.sha256(request.body).digest()).decode()
        request.headers["Content-Digest"] = f"sha-256=:{digest}:"
        request.headers["Signature-Input"] = f"sig={self.INPUT}"
        request.headers["Authorization"] = self.sign(request.method, request.path_url, request.headers)
        return request

    def sign(self, method, path, headers):
        values = {"@method": method, "@path": path, "@signature-params": self.INPUT}
        values |= {name: headers[name] for name in ("content-digest", "idempotency-key")}
        base = "\n".join(f'"{name}": {value}' for name, value in sorted(values.items()))
        return hmac.new(b"secret", base.encode(), "sha256").hexdigest()


class SigningAdapter(HTTPAdapter):
    """Signs each attempt anew, for servers that take a signature only once."""

    def send(self, request, **kwargs):
        return super().send(OAuth1("client", "secret")(request.copy()), **kwargs)


class TestSignatures:
    @pytest.mark.parametrize("auth", [SigV4(), MessageSignature()])
    def test_one_over_key_and_body_holds_in_each_attempt(self, server, session, auth):
        def verify(handler):
            expected = auth.sign(handler.command, handler.path, handler.headers)
            right.append(handler.headers["Authorization"] == expected)
            (drop_after, work)[len(right) - 1](handler)

        right = []
        server.script += [verify] * 2
        assert was_replayed(session.post(server.url, data=iter([b"a", b"bc"]), auth=auth))
        assert right == [True, True]

    def test_oauth_1_signs_once_for_all_attempts(self, server, session):
        seen = self.noted(server)
        session.post(server.url, data={"a": "b"}, auth=OAuth1("client", "secret"))
        assert len(set(server.keys)) == len(set(seen)) == 1

    def test_an_adapter_can_sign_each_attempt_anew(self, server, session):
        seen = self.noted(server)
        session.mount("http://", SigningAdapter())
        session.post(server.url, data={"a": "b"})
        assert len(set(server.keys)) == 1
        assert len(set(seen)) == len(seen) == 2

    def noted(self, server):
        def note(handler):
            seen.append(handler.headers["Authorization"])
            (drop_before, work)[len(seen) - 1](handler)

        seen = []
        server.script += [note] * 2
        return seen


class TestOAuth2:
    def test_the_call_is_sent_again_and_its_refresh_only_once(self, server, time, monkeypatch):
        def refresh(handler):
            assert parse_qs(server.seen[-1].body.decode())["refresh_token"] == ["old"]
            handler.respond(
                200, {"Content-Type": "application/json"}, b'{"access_token": "new", "expires_in": 60}'
            )

        monkeypatch.setenv("OAUTHLIB_INSECURE_TRANSPORT", "1")
        monkeypatch.setenv("NO_PROXY", "*")
        server.script += [refresh, drop_after]
        token = {
            "access_token": "old",
            "refresh_token": "old",
            "expires_in": -1,
            "token_type": "Bearer",
        }
        given = {"auto_refresh_url": f"{server.url}/token", "token_updater": lambda _token: None}
        with OAuth2Session("client", token=token, **given) as session:
            session.mount(f"{server.url}/payments", IdempotentAdapter(policy=time.policy()))
            assert was_replayed(session.post(f"{server.url}/payments"))
        assert [seen.path for seen in server.seen] == ["/token", "/payments", "/payments"]
        assert server.keys == [None, *server.done, *server.done]


FORKS = """
import os, sys
from flask_idempotency.client import IdempotentSession

session = IdempotentSession()
session.trust_env = False
session.post(sys.argv[1])
child = os.fork()
if child:
    os.waitpid(child, 0)
session.post(sys.argv[1])
"""


class TestProcesses:
    def test_those_that_are_forked_make_different_keys(self, server):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", FORKS, server.url], check=True, env=environment)
        assert len(set(server.keys)) == len(server.keys) == 3

    def test_a_pool_takes_a_session_and_gives_its_response_back(self, server):
        server.script += [drop_after]
        session = IdempotentSession(RetryPolicy(backoff=0.01))
        session.trust_env = False
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            response = pool.submit(session.post, server.url).result()
        assert was_replayed(response)
        assert attempts_of(response) == 2
        assert server.keys == [response.request.headers["Idempotency-Key"]] * 2
        assert urlsplit(response.url).port == server.port
