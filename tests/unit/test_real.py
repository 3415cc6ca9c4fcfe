"""What ``make real`` says of two runs of a suite."""

import re
from dataclasses import replace
from datetime import datetime, timezone

from real.__main__ import PAGE, noted
from real.comparison import Result, differences, table
from real.packages import PACKAGES

PLAIN = Result({"a": "passed", "b": "failed", "c": "passed"}, writes=3)


def test_a_test_that_fails_in_both_runs_is_no_difference():
    assert differences(PLAIN, Result({"a": "passed", "b": "failed", "c": "passed"})) == []


def test_each_other_result_and_each_missing_test_is_named():
    assert differences(PLAIN, Result({"a": "error", "b": "failed", "d": "passed"})) == [
        "a: passed, then error",
        "c: passed, then missing",
        "d: missing, then passed",
    ]


def test_the_table_counts_and_lists_what_differs():
    twice = Result({**PLAIN.tests, "a": "error"}, 3, 2, 1, ["b: POST /: 201 CREATED, then 200 OK"])
    assert table({"plain": PLAIN, "twice": twice}).splitlines()[2:] == [
        "| plain | 3 | 2 | 1 | 0 | 3 | 0 | 0 | – |",
        "| twice | 3 | 1 | 2 | 0 | 3 | 2 | 1 | 1 |",
        "",
        "- twice: a: passed, then error",
        "- twice: b: POST /: 201 CREATED, then 200 OK",
    ]


def rows_of(page):
    return re.findall(r"^\| shop .*$", page, re.MULTILINE)


def test_a_run_is_noted_in_place_of_the_last_one_in_the_same_modes():
    before, shop = PAGE.read_text(encoding="utf-8"), replace(PACKAGES[0], name="shop", version="1.0")
    today = datetime.now(timezone.utc).date()
    page = noted(before, shop, {"plain": PLAIN, "twice": PLAIN})
    page = noted(page, replace(shop, version="1.1"), {"plain": Result({"a": "skipped"}, 1)})
    page = noted(page, replace(shop, version="1.1"), {"plain": Result({"a": "passed"}, 1)})
    assert rows_of(page) == [
        f"| shop 1.0 | {today} | twice | 3 | 2 | 1 | 0 | 3 | 0 | 0 | 0 |",
        f"| shop 1.1 | {today} | plain | 1 | 1 | 0 | 0 | 1 | 0 | 0 | – |",
    ]
    assert [line for line in page.splitlines() if "| shop " not in line] == before.splitlines()
