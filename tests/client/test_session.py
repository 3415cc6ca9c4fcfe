"""What only requests has: the session, and its adapter in sessions of other kinds."""

from __future__ import annotations

import copy
import io
import pickle
import time as real_time

import pytest
import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPDigestAuth
from requests.exceptions import ChunkedEncodingError, ContentDecodingError, ReadTimeout
from urllib3 import HTTPResponse, Timeout

from flask_idempotency.client import (
    IdempotentAdapter,
    IdempotentSession,
    RetryPolicy,
    attempts_of,
    was_replayed,
)
from tests.client.conftest import (
    break_off,
    drop_after,
    drop_before,
    hang,
    respond,
    trickle,
    work,
    written,
)

CHALLENGE = respond(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')
MOVED = respond(307, Location="/there")
BODIES = {
    "bytes": lambda: b"abc",
    "a file": lambda: io.BytesIO(b"abc"),
    "a text file": lambda: io.StringIO("abc"),
    "an iterator": lambda: iter([b"a", b"bc"]),
    "an iterator of text": lambda: iter(["a", "bc"]),
}

bodies = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)


@pytest.fixture
def session(time):
    with IdempotentSession(time.policy()) as session:
        session.trust_env = False
        yield session


@pytest.fixture
def foreign(time):
    """A session that knows nothing of keys, with our adapter."""
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", IdempotentAdapter(policy=time.policy()))
        yield session


@pytest.fixture(params=["session", "foreign"])
def either(request):
    """Each of the two."""
    return request.getfixturevalue(request.param)


def unpickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class TestSession:
    def test_a_streamed_response_is_left_to_the_caller_to_read(self, server, session):
        server.script += [respond(503), break_off]
        with session.post(server.url, stream=True) as response:
            assert response.status_code == 201
            with pytest.raises(ChunkedEncodingError):
                response.content  # noqa: B018
        assert len(server.seen) == 2

    @pytest.mark.parametrize("timeout", [0.1, (5, 0.1), Timeout(connect=5, read=0.1)])
    def test_a_call_can_have_a_time_limit_of_its_own(self, server, session, timeout):
        server.script += [hang]
        begun = real_time.monotonic()
        assert was_replayed(session.post(server.url, timeout=timeout))
        assert real_time.monotonic() - begun < 5

    def test_its_time_limit_holds_for_a_call_without_a_key(self, server, time):
        server.script += [hang]
        with IdempotentSession(time.policy(), timeout=0.1) as session, pytest.raises(ReadTimeout):
            session.get(server.url)
        assert len(server.seen) == 1

    def test_a_time_out_is_raised_as_one(self, server, time):
        server.script += [hang] * 2
        with (
            IdempotentSession(time.policy(retries=1), timeout=0.1) as session,
            pytest.raises(ReadTimeout) as lost,
        ):
            session.post(server.url)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]] * 2

    def test_the_deadline_counts_over_the_sign_in(self, server, time):
        server.script += [respond(503, Retry_After="40"), CHALLENGE, respond(503, Retry_After="30")]
        with IdempotentSession(time.policy(deadline=60)) as session:
            session.trust_env = False
            response = session.post(server.url, auth=HTTPDigestAuth("alice", "pw"))
        assert (response.status_code, time.waits) == (503, [40])

    def test_a_prepared_request_that_is_sent_again_keeps_its_key(self, server, session):
        prepared = requests.Request("POST", server.url).prepare()
        first, second = session.send(prepared), session.send(prepared)
        assert not was_replayed(first)
        assert was_replayed(second)

    def test_a_request_that_is_prepared_again_is_another_call(self, server, session):
        request = requests.Request("POST", server.url, headers={"X-User": "alice"})
        for _ in range(2):
            session.send(session.prepare_request(request))
        assert len(set(server.keys)) == 2
        assert request.headers == {"X-User": "alice"}

    @bodies
    def test_key_and_body_are_there_when_the_request_is_signed(self, server, session, body):
        def sign(request):
            signed.append((request.headers["Idempotency-Key"], request.body))
            return request

        signed = []
        server.script += [drop_before]
        session.post(server.url, data=body(), auth=sign)
        assert [(seen.key, seen.body) for seen in server.seen] == signed * 2

    def test_a_key_of_the_sessions_headers_is_kept(self, server, session):
        session.headers["idempotency-key"] = "of-the-job"
        session.post(server.url, headers={"Accept": None})
        assert server.keys == ["of-the-job"]

    def test_the_body_of_a_call_without_a_key_is_not_held_in_memory(self, server, session):
        file = io.BytesIO(b"abc")
        assert session.put(server.url, data=file).request.body is file

    @pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, unpickled])
    def test_a_copy_and_one_in_another_process_are_the_same_session(self, server, twin):
        policy = RetryPolicy(retries=1, backoff=0.001, header="X-Key")
        server.script += [drop_before, hang]
        with twin(IdempotentSession(policy, timeout=0.1)) as session:
            session.trust_env = False
            with pytest.raises(ReadTimeout) as lost:
                session.post(server.url)
            assert lost.value.request.headers["X-Key"]
            assert session.policy == policy

    def test_unpickled_policies_do_not_wait_alike(self):
        policy = RetryPolicy()
        assert unpickled(policy).random() != unpickled(policy).random()


class Custom(HTTPAdapter):
    """An adapter of the application's own, which says so."""

    def send(self, request, **kwargs):
        request.headers["X-Sent-By"] = "custom"
        return super().send(request, **kwargs)


class Copying(HTTPAdapter):
    """Sends a copy, as an adapter does that signs each attempt anew."""

    def send(self, request, **kwargs):
        return super().send(request.copy(), **kwargs)


class Watching(HTTPAdapter):
    """Wraps the file that a body is read from, as CacheControl does to fill its cache."""

    def build_response(self, request, raw):
        raw._fp = self.watched = Watched(raw._fp)
        return super().build_response(request, raw)


class Cache(HTTPAdapter):
    """Has a response without its request, and without the headers that framed it on its way."""

    def send(self, request, **_options):
        raw = HTTPResponse(io.BytesIO(b"abc"), version=11, status=200, preload_content=False)
        response = self.build_response(request, raw)
        response.request = None
        return response


class Watched:
    def __init__(self, file):
        self.file = file
        self.seen = b""

    def read(self, size=-1):
        part = self.file.read(size)
        self.seen += part
        return part

    def __getattr__(self, name):
        return getattr(self.file, name)


class TestMountedAdapters:
    def test_the_session_retries_through_an_adapter_that_switches_retries_off(self, server, session):
        session.mount(server.url, Custom(max_retries=0))
        server.script += [drop_after]
        response = session.post(server.url)
        assert was_replayed(response)
        assert response.request.headers["X-Sent-By"] == "custom"

    def test_an_adapter_with_a_policy_of_its_own_keeps_it(self, server, session, time):
        session.mount(server.url, IdempotentAdapter(Custom(), policy=time.policy(retries=2)))
        server.script += [respond(503)] * 9
        assert session.post(server.url).request.headers["X-Sent-By"] == "custom"
        assert len(server.seen) == 3

    def test_one_that_sends_a_copy_of_the_request_leaves_its_attempts_to_be_counted(self, server, time):
        server.script += [drop_before, work, drop_before, drop_before]
        with IdempotentSession(time.policy(retries=1)) as session:
            session.mount("http://", Copying())
            assert attempts_of(session.post(server.url)) == 2
            with pytest.raises(requests.ConnectionError) as lost:
                session.post(server.url)
        assert attempts_of(lost.value) == 2

    def test_one_that_watches_the_body_sees_all_of_it(self, server, session):
        session.mount("http://", adapter := Watching())
        body = session.post(server.url).content
        assert adapter.watched.seen == body == b'{"id": 1}'

    def test_a_response_from_a_cache_need_not_say_where_it_ends_or_what_was_sent(self, session):
        session.mount("http://", Cache())
        response = session.post("http://api.example.com")
        assert response.content == b"abc"
        assert response.request.headers["Idempotency-Key"]

    @pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, unpickled])
    def test_a_copy_of_ours_is_the_same_adapter(self, server, twin):
        adapter = twin(IdempotentAdapter(Custom(), policy=RetryPolicy(retries=1, backoff=0.001)))
        server.script += [respond(503)] * 2
        with requests.Session() as session:
            session.trust_env = False
            session.mount("http://", adapter)
            response = session.post(server.url)
        assert response.request.headers["X-Sent-By"] == "custom"
        assert len(server.seen) == 2

    def test_one_that_is_mounted_twice_serves_both_sessions(self, server, time):
        """A call of the one does not begin with that of the other."""
        adapter = IdempotentAdapter(policy=time.policy(deadline=60))
        server.script += [respond(503, Retry_After="40"), work, respond(503, Retry_After="40")]
        for session in (IdempotentSession(time.policy()), requests.Session()):
            with session:
                session.trust_env = False
                session.mount("http://", adapter)
                assert session.post(server.url).status_code == 201
        assert time.waits == [40, 40]

    def test_closing_the_session_closes_what_is_mounted(self, session):
        closed = []
        adapter = Custom()
        adapter.close = lambda: closed.append(adapter)
        session.mount("http://one", adapter)
        session.mount("http://two", IdempotentAdapter(adapter))
        session.close()
        assert closed == [adapter] * 2


class TestEitherSession:
    def test_a_lost_response_is_asked_for_again_with_the_same_key(self, server, either):
        server.script += [drop_after, break_off]
        response = either.post(server.url)
        assert was_replayed(response)
        assert server.keys == [response.request.headers["Idempotency-Key"]] * 3

    def test_a_call_without_a_key_is_sent_once(self, server, either):
        server.script += [respond(503)]
        assert either.get(server.url).status_code == 503
        assert len(server.seen) == 1

    @bodies
    def test_a_body_is_sent_whole_each_time_and_after_a_redirect(self, server, either, body):
        server.script += [drop_before, MOVED, respond(503)]
        either.post(server.url, data=body())
        assert [seen.path for seen in server.seen] == ["/", "/", "/there", "/there"]
        assert [seen.body for seen in server.seen] == [b"abc"] * 4
        assert len(set(server.keys)) == 1

    @pytest.mark.parametrize("body", ["bytes", "a file"])
    def test_a_call_that_has_to_sign_in_first_is_one_call(self, server, either, body):
        server.script += [CHALLENGE, respond(503), drop_after]
        auth = HTTPDigestAuth("alice", "pw")
        assert was_replayed(either.post(server.url, data=BODIES[body](), auth=auth))
        assert server.keys == server.done * 4
        assert [seen.body for seen in server.seen] == [b"abc"] * 4

    def test_a_file_is_sent_from_where_it_stands(self, server, either):
        file = io.BytesIO(b"head abc")
        file.seek(5)
        server.script += [drop_before, MOVED]
        either.post(server.url, data=file)
        assert [seen.body for seen in server.seen] == [b"abc"] * 3

    def test_a_response_that_cannot_be_decoded_is_an_error_with_its_request(self, server, either):
        server.script += [lambda handler: handler.respond(201, {"Content-Encoding": "gzip"}, b"abc")]
        with pytest.raises(ContentDecodingError) as lost:
            either.post(server.url)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]]


class TestStreamedResponses:
    """A success that the caller streams is not read here, but its headers are looked at."""

    def test_one_without_an_end_is_an_error_at_last(self, server, time):
        server.script += [written("HTTP/1.1 201 CREATED\r\n\r\n{}")] * 2
        with (
            IdempotentSession(time.policy(retries=1)) as session,
            pytest.raises(requests.ConnectionError, match="broke off") as lost,
        ):
            session.post(server.url, stream=True)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]] * 2

    @pytest.mark.parametrize(
        "legal", ["HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"]
    )
    def test_what_http_allows_is_a_response(self, server, session, legal):
        server.script += [written(legal)]
        assert session.post(server.url, stream=True).content == b""
        assert len(server.seen) == 1

    def test_a_redirect_that_comes_a_few_bytes_at_a_time_ends_at_the_deadline(self, server):
        server.script += [
            trickle("307 TEMPORARY REDIRECT", "Location: /there\r\nContent-Length: 10000")
        ]
        with IdempotentSession(RetryPolicy(deadline=0.3)) as session, pytest.raises(ReadTimeout):
            session.post(server.url, stream=True)

    def test_its_connection_serves_no_other_call(self, server):
        server.script += [trickle("200 OK", "Content-Length: 10000")]
        with IdempotentSession(RetryPolicy(deadline=0.3)) as session:
            with pytest.raises(ReadTimeout):
                session.post(server.url)
            assert session.get(server.url).json() == {"id": 1}


class TestFraming:
    """Which responses come in chunks, http.client and urllib3 decide differently."""

    @pytest.mark.parametrize("coding", ["chunked ", "chunked, chunked", "identity, chunked", "Chunked"])
    @pytest.mark.parametrize("connection", ["close", "keep-alive"])
    def test_chunks_are_read_as_a_plain_session_reads_them(self, server, session, coding, connection):
        whole = (
            f"HTTP/1.1 201 CREATED\r\nTransfer-Encoding: {coding}\r\nConnection: {connection}\r\n\r\n"
            '4\r\n{"id\r\n4\r\n":1}\r\n0\r\n\r\n'
        )
        cut = whole.index("}")
        server.script += [written(whole[:cut]), work, written(whole, stays_open=connection != "close")]
        assert was_replayed(session.post(server.url)), "a body that was cut off"
        assert session.post(server.url).content == b'{"id":1}'
        assert len(server.seen) == 3

    def test_a_coding_that_only_looks_like_chunks_does_not_tell_the_end(self, server, session):
        server.script += [written("HTTP/1.1 201 CREATED\r\nTransfer-Encoding: unchunked\r\n\r\n{}")]
        assert was_replayed(session.post(server.url))


class TestInterimResponses:
    """http.client takes each 1xx but 100 for the response, and the real one comes after it."""

    @staticmethod
    def hint(handler):
        status, headers, body = handler.world.work(handler.key)
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n")
        handler.world.let_go.wait(0.05)
        handler.respond(status, headers, body)

    def test_each_call_gets_its_own_response(self, server, session):
        server.script += [self.hint, self.hint, work, work, self.hint]
        assert [session.post(server.url).json()["id"] for _ in range(4)] == [1, 2, 3, 4]
        assert [session.post(server.url, stream=True).json()["id"] for _ in range(2)] == [5, 6]

    def test_that_of_a_call_without_a_key_is_no_others(self, server, session):
        server.script += [self.hint, work, work]
        session.get(server.url)
        assert [session.post(server.url).json()["id"] for _ in range(2)] == [2, 3]

    def test_a_connection_that_now_speaks_another_protocol_is_left_open(self, server, session):
        upgrade = {"Connection": "upgrade", "Upgrade": "other"}
        server.script += [written("HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\nhello")]
        with session.get(server.url, headers=upgrade, stream=True) as response:
            assert response.raw._original_response.fp.read(5) == b"hello"

    def test_nothing_else_at_last_is_an_error(self, server, time):
        server.script += [written("HTTP/1.1 103 Early Hints\r\nContent-Length: 0\r\n\r\n")] * 2
        with (
            IdempotentSession(time.policy(retries=1)) as session,
            pytest.raises(requests.ConnectionError, match="interim"),
        ):
            session.post(server.url)
