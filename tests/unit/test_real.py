"""What ``make real`` says of two runs of a suite."""

from real.comparison import Result, differences, table

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
