"""The applications of pages that are not only read: each is used as its page says, with retries."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from flask import request, session
from flask_jwt_extended import create_access_token
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import idempotent
from tests.docs.pages import ROOT, blocks
from tests.sessions import Plain

REPLAYED = "Idempotent-Replayed"


@pytest.mark.parametrize("path", ["/api/payments", "/shop/payments", "/partners/orders"])
def test_each_caller_has_keys_of_its_own_and_a_stranger_none(page, path):
    shop = page("protect.md", "authentication")
    sign_in = lambda user: session.update(user_id=user) or {}  # noqa: E731
    shop.app.add_url_rule("/sign-in/<user>", "sign_in", sign_in)
    firsts = []
    for who in "alice", "bob":
        client = shop.app.test_client()
        client.get(f"/sign-in/{who}")
        hashed = hashlib.sha256(who.encode()).hexdigest()
        shop.sql(f"INSERT INTO partner (hashed_key) VALUES ('{hashed}')")
        with shop.app.app_context():
            client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {create_access_token(who)}"
        client.environ_base["HTTP_X_API_KEY"] = who
        first, again = (
            client.post(path, json={}, headers={"Idempotency-Key": "key-1"}) for _ in range(2)
        )
        assert (first.status_code, again.json, again.headers[REPLAYED]) == (201, first.json, "true")
        firsts.append(first.json)
    assert firsts[0] != firsts[1]
    assert shop.post(path).status_code == 401
    assert shop.count("idempotency_record") == 2


@pytest.mark.parametrize(("path", "status"), [("payments", 204), ("refunds", 200)])
def test_an_event_of_a_webhook_is_handled_once_and_only_if_it_is_signed(page, path, status):
    shop = page("queues.md", "webhooks")

    def send(number=1, secret=b"from the provider's dashboard", **more):
        event = {"id": f"evt_{number}", "type": "payment.succeeded", "payment": "pay_1", **more}
        body = json.dumps(event).encode()
        signature = hmac.new(secret, body, hashlib.sha256).hexdigest()
        headers = {"X-Signature": signature, "Content-Type": "application/json"}
        return shop.app.test_client().post(f"/webhooks/{path}", data=body, headers=headers).status_code

    assert send(secret=b"guessed") == 401
    assert (shop.count("idempotency_record"), shop.count("booking")) == (0, 0)
    assert [send(delivery=number) for number in range(3)] == [status] * 3  # a counter, as usual
    assert shop.count("booking") == 1
    assert (send(2), send(secret=b"guessed")) == (status, 401)
    assert shop.count("booking") == 2


def test_a_graphql_request_has_one_key_and_where_it_shall_each_mutation(page):
    shop = page("graphql.md")

    def send(query, key=None, path="/graphql", **variables):
        extensions = {"extensions": {"idempotencyKey": key}} if key else {}
        return shop.post(path, {"query": query, "variables": variables, **extensions}, key=None)

    pay = "mutation ($n: Int!) { pay(amount: $n) { id amount } }"
    first, again = (send(pay, "order-7", n=5) for _ in range(2))
    assert first.json == {"data": {"pay": {"id": "1", "amount": 5}}}
    assert (again.json, again.headers[REPLAYED]) == (first.json, "true")
    assert (send(pay, "order-7", n=6).status_code, send(pay, n=5).status_code) == (422, 400)
    assert send("{ payments }").json == {"data": {"payments": 1}}
    several = "mutation { a: pay(amount: 5) { id } b: pay(amount: 0) { id } }"
    assert send(several, "order-8").json["data"]["b"] is None
    assert shop.count("payment") == 1, "an error undoes the mutations before it"

    def each(second, fields="id", order="1"):
        a = f'a: pay(amount: 5, idempotencyKey: "{order}a") {{ {fields} }}'
        b = f'b: pay(amount: {second}, idempotencyKey: "{order}b") {{ {fields} }}'
        return send(f"mutation {{ {a} {b} }}", path="/graphql/each").json

    first, again = each(0), each(0, "id amount")
    assert (first["data"]["b"], again["data"]["a"]["id"]) == (None, first["data"]["a"]["id"])
    assert first["errors"][0]["message"] == "The amount must be positive."
    assert each(6, order="2") == each(6, order="2")
    assert shop.count("payment") == 4
    [error] = each(7, order="2")["errors"]
    assert (error["path"], error["extensions"]["code"]) == (["b"], "key-reused")


def test_a_tool_is_run_once_for_each_call_of_a_model(page):
    shop = page("agent-tools.md")

    def call(name, call_id=None, **arguments):
        meta = {} if call_id is None else {"_meta": {shop.names["CALL_ID"]: call_id}}
        params = {"name": name, "arguments": arguments, **meta}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        result = shop.post("/mcp", message, key=None).json["result"]
        return result["content"][0]["text"], result["isError"]

    paid = [call("pay_order", order=order, amount=500) for order in "778"]
    assert paid == [(f'{{"payment": {number}}}', False) for number in (1, 1, 2)]
    for call_id in "call_1", "call_1", "call_2":
        assert call("tip", call_id, amount=100)[1] is False
    assert call("tip", amount=100)[1] is True, "it needs the call's identifier"
    assert call("count_payments") == ("4", False)


def test_a_restarted_loop_of_an_agent_gets_the_results_it_had(page):
    shop = page("agent-tools.md")
    run, tip = shop.names["run_tool"], {"id": "call_1", "name": "tip", "arguments": {"amount": 100}}
    talks = ("alice", "talk-1"), ("alice", "talk-1"), ("alice", "talk-2"), ("bob", "talk-1")
    assert [run(*talk, tip)["payment"] for talk in talks] == [1, 1, 2, 3]

    def parcel(call_id):
        return shop.names["once"](call_id, lambda _account: 1 / 0, atomic=False, name="parcel")

    shop.names["TOOLS"]["parcel"] = parcel
    for error, said in (ZeroDivisionError, None), (shop.names["ToolFailed"], "Do not call again"):
        with pytest.raises(error, match=said):
            run("alice", "talk-1", {"id": "call_1", "name": "parcel", "arguments": {}})


@pytest.mark.parametrize("path", ["/payments", "/orders"])
def test_what_is_committed_above_the_view_is_there_once_or_not_at_all(page, path):
    shop = page("session.md")
    shop.sql("ALTER TABLE payment ADD CONSTRAINT one UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED")
    answers = [shop.post(path, key=key) for key in ("key-1", "key-1", "key-2", "key-2")]
    assert [answer.status_code for answer in answers] == [201, 201, 500, 500]
    assert (REPLAYED in answers[1].headers, shop.count("payment")) == (True, 1)


def test_each_tenant_has_a_schema(page):
    shop = page("session.md")
    for tenant in "acme", "initech":
        shop.sql(f"CREATE SCHEMA {tenant}")
        shop.sql(f"CREATE TABLE {tenant}.payment (LIKE payment INCLUDING ALL)")
        answers = [shop.post("/tenants/payments", **{"X-Tenant": tenant}) for _ in range(2)]
        assert [answer.json for answer in answers] == [{"payments": 1}] * 2
    assert [shop.count(f"{name}payment") for name in ("", "acme.", "initech.")] == [0, 1, 1]


def test_row_level_security_holds_in_the_view_and_an_audit_row_survives_a_rollback(page):
    shop = page("session.md")
    assert [shop.post("/transfers").status_code for _ in range(2)] == [503, 503]
    assert (shop.count("payment"), shop.count("note")) == (0, 2)
    for statement in (
        "DO $$ BEGIN CREATE ROLE shop_tenant; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
        "GRANT INSERT, SELECT ON payment TO shop_tenant",
        "GRANT USAGE ON payment_id_seq TO shop_tenant",
        "ALTER TABLE payment ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON payment USING (tenant = current_setting('app.tenant'))",
    ):
        shop.sql(statement)
    assert [shop.post("/secured/payments").status_code for _ in range(2)] == [201, 201]
    assert shop.sql("SELECT tenant FROM payment") == [("alice",)]
    shop.sql("DROP OWNED BY shop_tenant")
    shop.sql("DROP ROLE shop_tenant")


def test_reads_outside_of_operations_go_to_the_replica(make_world, postgres):
    names: dict[str, Any] = {}
    [code] = [each for each in blocks(ROOT / "docs/session.md", "python") if "routing" in each.mark]
    exec(compile(code.source, "session.md", "exec"), names)  # noqa: S102
    replica = postgres.database("replica")  # nothing of the primary ever arrives in it
    db = SQLAlchemy(session_options={"class_": names["RoutingSession"]})
    world = make_world(db=db, SQLALCHEMY_BINDS={"replica": replica})

    def database() -> str:
        return db.session.scalar(sa.text("SELECT current_database()"))

    @world.app.post("/payments")
    @idempotent
    def pay():
        db.session.add(world.Payment(amount=1))
        db.session.commit()
        return {"from": database()}, 201

    world.app.get("/database", endpoint="database")(database)
    answers = [world.post() for _ in range(2)]
    assert [answer.json for answer in answers] == [answers[0].json] * 2
    assert answers[0].json["from"] != world.client.get("/database").text == "replica"
    assert world.count() == 1


def test_thirty_lines_of_your_own_commit_the_payment_and_its_response_once(page):
    shop, statuses = page("thirty-lines.md"), iter([500, 201])
    shop.sql("CREATE TABLE payment (amount integer)")

    @shop.app.post("/payments")
    @shop.names["once"]
    def pay():
        shop.db.session.execute(sa.text("INSERT INTO payment VALUES (5)"))
        return {"paid": 5}, next(statuses)

    answers = [shop.post("/payments") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 201, 201]
    assert (answers[2].json, shop.count("payment")) == ({"paid": 5}, 1)
    assert shop.post("/payments", {"amount": 6}).status_code == 422
    assert shop.post("/payments", key=None).status_code == 400


@pytest.mark.usefixtures("patient_observing")
def test_observing_logs_the_lines_that_the_page_shows(page, caplog):
    shop, statuses = page("move.md"), iter([201, 201, 201, 201, 201, 409, 201])
    view = idempotent(enforce=False)(lambda: (request.get_data(), next(statuses)))
    shop.app.add_url_rule("/observed", "create_payment", view, methods=["POST"])
    with caplog.at_level("INFO", "flask_idempotency"):
        keys = [None, "1", "1", "1", "2", "2", "bad key"]
        for key, amount in zip(keys, [1, 1, 1, 2, 1, 1, 1], strict=True):
            shop.post("/observed", {"amount": amount}, key)
    logged = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    text = (ROOT / "docs/move.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?m)^(?:INFO|WARNING) operation create_payment .*$", text)
    changing = re.compile(r"seconds [\d.]+|id [0-9a-f]{8}")
    assert [changing.sub("", line) for line in logged] == [changing.sub("", line) for line in shown]


def test_after_the_statement_for_leaving_no_table_of_the_extension_is_there(page):
    (block,) = blocks(ROOT / "docs/move.md", "postgres")
    shop = page("move.md")
    tables = "SELECT tablename FROM pg_tables WHERE tablename LIKE 'idempotency%'"
    assert shop.sql(tables)
    shop.sql(block.text)
    assert shop.sql(tables) == []


OF_DB, OF_SESSION = [
    block.text for block in blocks(ROOT / "docs/testing.md", "python") if block.mark == "fragment"
][-2:]


@pytest.mark.parametrize("store", ["hybrid", "sql"], indirect=True)
@pytest.mark.parametrize(("code", "make_db"), [(OF_DB, SQLAlchemy), (OF_SESSION, Plain)])
def test_fixtures_of_ones_own_roll_a_request_and_its_record_back(
    make_world, add_view, tmp_path, store, code, make_db
):
    db = make_db()
    on_sqlite = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/test.db"} if store == "sql" else {}
    world = make_world(db=db, TESTING=True, **on_sqlite)
    add_view(world)
    with world.app.app_context():
        names = {"sa": sa, "db": db, "session": db.session, "engine": db.engine}
    names["pytest"] = SimpleNamespace(fixture=lambda **_: contextmanager)
    exec(code, names)  # noqa: S102
    for _test in range(2):
        with names["rolled_back"](*[world.app] if code is OF_DB else []):
            answers = [world.post() for _ in range(2)]
            assert [answer.status_code for answer in answers] == [201, 201]
            assert answers[1].json == answers[0].json
            assert [REPLAYED in answer.headers for answer in answers] == [False, True]
        assert world.count() == len(world.records()) == 0
