"""``graphql.md`` does what it says: its endpoints get queries, mutations, errors, batches."""

from __future__ import annotations

import json
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

    def test_a_mutation_without_a_key_is_rejected(self, shop):
        answer = self.send(shop, key=None, amount=5)
        assert (answer.status_code, answer.json["type"].split(":")[-1]) == (400, "key-required")
        named = "query A { payments } mutation B { pay(amount: 5) { id } }"
        for operation, status in ("A", 200), ("B", 400):
            body = {"query": named, "operationName": operation}
            assert shop.post("/graphql", body, key=None).status_code == status
        assert shop.count("payment") == 0

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
