"""``graphql.md`` does what it says: its endpoints get queries, mutations, errors, batches."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.docs.how_to import Page

PAY = "mutation ($amount: Int!) { pay(amount: $amount) { id amount } }"


@pytest.fixture
def shop(page) -> Page:
    return page("graphql.md")


class TestOneKeyForTheRequest:
    def send(self, shop, query=PAY, key: Any = "order-7", **variables: Any) -> Any:
        body = {"query": query, "variables": variables}
        if key is not None:
            body["extensions"] = {"idempotencyKey": key}
        return shop.post("/graphql", body, key=None)

    def test_a_mutation_is_run_once(self, shop):
        first, again = (self.send(shop, amount=5) for _ in range(2))
        assert first.json == {"data": {"pay": {"id": "1", "amount": 5}}}
        assert (again.json, again.headers["Idempotent-Replayed"]) == (first.json, "true")
        assert shop.count("payment") == 1

    def test_the_order_of_the_json_does_not_matter_but_the_variables_do(self, shop):
        self.send(shop, amount=5)
        turned = {"variables": {"amount": 5}, "query": PAY, "extensions": {"idempotencyKey": "order-7"}}
        post = shop.app.test_client().post  # its json= would sort the members
        again = post("/graphql", data=json.dumps(turned, indent=1), content_type="application/json")
        assert (again.status_code, again.headers["Idempotent-Replayed"]) == (200, "true")
        assert self.send(shop, amount=6).status_code == 422
        assert shop.count("payment") == 1

    def test_queries_pass_and_see_what_is_new(self, shop):
        seen = []
        for key in "order-7", "order-8":
            seen.append(self.send(shop, "{ payments }", "query").json["data"]["payments"])
            self.send(shop, key=key, amount=5)
        assert seen == [0, 1]

    def test_a_mutation_without_a_key_is_rejected(self, shop):
        answer = self.send(shop, key=None, amount=5)
        assert (answer.status_code, answer.json["type"].split(":")[-1]) == (400, "key-required")
        named = "query A { payments } mutation B { pay(amount: 5) { id } }"
        for operation, status in ("A", 200), ("B", 400):
            body = {"query": named, "operationName": operation}
            assert shop.post("/graphql", body, key=None).status_code == status
        assert shop.count("payment") == 0

    @pytest.mark.parametrize("query", ["mutation {", "{ payments } { payments }"])
    def test_what_cannot_run_is_an_error_of_graphql(self, shop, query):
        answer = self.send(shop, query, key=None)
        assert (answer.status_code, "errors" in answer.json) == (200, True)

    def test_a_batch_is_rejected(self, shop):
        assert shop.post("/graphql", [{"query": PAY}], key=None).status_code == 400

    def test_errors_are_not_stored_and_undo_the_mutations_before(self, shop):
        several = "mutation ($second: Int!) { a: pay(amount: 5) { id } b: pay(amount: $second) { id } }"
        for _ in range(2):
            answer = self.send(shop, several, second=0)
            assert answer.json["data"]["a"] is not None
            assert answer.json["data"]["b"] is None
            assert "Idempotent-Replayed" not in answer.headers
            assert shop.count("payment") == 0
        answers = [self.send(shop, several, "order-8", second=6) for _ in range(2)]
        assert answers[0].json == answers[1].json
        assert shop.count("payment") == 2

    def test_nor_is_a_failure_of_the_view(self, shop):
        execute = shop.names.pop("execute")
        assert self.send(shop, amount=5).status_code == 500
        shop.names["execute"] = execute
        assert self.send(shop, amount=5).json["data"]["pay"] is not None

    def test_a_rejection_may_have_the_form_of_graphql(self, shop):
        @shop.app.errorhandler(shop.names["IdempotencyError"])
        def as_graphql(problem):
            return {"errors": [{"message": problem.title}]}, problem.status

        answer = self.send(shop, key=None, amount=5)
        assert (answer.status_code, list(answer.json)) == (400, ["errors"])

    def test_by_default_errors_are_stored(self, shop):
        view = shop.names["idempotent"](key=shop.names["key_of_mutation"], required=False)
        shop.app.add_url_rule(
            "/default", "default", view(lambda: {"data": None, "errors": []}), methods=["POST"]
        )
        body = {"query": PAY, "extensions": {"idempotencyKey": "k"}}
        answers = [shop.post("/default", body, key=None) for _ in range(2)]
        assert answers[1].headers["Idempotent-Replayed"] == "true"

    def test_a_resolver_that_leaves_changes_is_refused_where_its_response_would_be_stored(self, shop):
        def forgets(account, amount):
            shop.db.session.add(shop.names["Payment"](account=account, amount=amount))
            shop.db.session.flush()
            return {"id": 1, "amount": amount}

        shop.names["save_payment"] = forgets
        assert self.send(shop, amount=5).status_code == 500
        assert shop.count("payment") == 0


class TestAKeyForEachMutation:
    def send(self, shop, body) -> Any:
        return shop.post("/graphql/each", body, key=None).json

    def mutation(self, second=6, fields="id") -> dict[str, Any]:
        a = f'a: pay(amount: 5, idempotencyKey: "1") {{ {fields} }}'
        return {
            "query": f'mutation {{ {a} b: pay(amount: {second}, idempotencyKey: "2") {{ {fields} }} }}'
        }

    def test_only_the_one_that_failed_is_run_again(self, shop):
        first = self.send(shop, self.mutation(second=0))
        assert (first["data"]["b"], shop.count("payment")) == (None, 1)
        assert first["errors"][0]["message"] == "The amount must be positive."
        again = self.send(shop, self.mutation(second=0, fields="id amount"))
        assert (again["data"]["a"], shop.count("payment")) == ({**first["data"]["a"], "amount": 5}, 1)

    def test_each_is_run_once_also_in_a_batch(self, shop):
        done = self.send(shop, self.mutation())
        assert self.send(shop, [self.mutation(), {"query": "{ payments }"}]) == [
            done,
            {"data": {"payments": 2}},
        ]

    def test_the_error_says_which_problem_it_is(self, shop):
        self.send(shop, self.mutation())
        [error] = self.send(shop, self.mutation(second=7))["errors"]
        assert (error["path"], error["extensions"]["code"]) == (["b"], "key-reused")

    def test_one_that_still_runs_says_when_to_come_again(self, shop):
        running, go_on, save = threading.Event(), threading.Event(), shop.names["save_payment"]

        def slowly(account, amount):
            running.set()
            assert go_on.wait(20)
            return save(account, amount)

        slowly.__module__, slowly.__qualname__ = save.__module__, save.__qualname__
        shop.names["save_payment"] = slowly
        first = threading.Thread(target=lambda: self.send(shop, self.mutation()))
        first.start()
        assert running.wait(20)
        one = {"query": 'mutation { pay(amount: 5, idempotencyKey: "1") { id } }'}
        [error] = self.send(shop, one)["errors"]
        go_on.set()
        first.join()
        assert error["extensions"]["code"] == "request-in-progress"
        assert error["extensions"]["retryAfter"] >= 1
        assert shop.count("payment") == 2

    def test_one_without_a_key_is_not_run(self, shop):
        answer = self.send(shop, {"query": "mutation { pay(amount: 5) { id } }"})
        assert (answer["data"]["pay"], shop.count("payment")) == (None, 0)
        assert answer["errors"][0]["extensions"]["code"] == "key-malformed"
