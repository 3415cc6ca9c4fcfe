"""kill -9 of a gunicorn worker in the middle of a payment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.acceptance.conftest import Shop

PROBE_AFTER = 1.0  # how many seconds a lock in Redis counts as its owner's sign of life


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slow") / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module", params=["hybrid", "postgres"])
def slow_shop(open_shop: Callable[..., Shop], pipe: Path, request: pytest.FixtureRequest) -> Shop:
    more = {"SLOW_SHOP_PIPE": str(pipe)}
    if request.param == "postgres":
        more["REDIS_URL"] = ""
    here = str(Path(__file__).parent)
    return open_shop("slow_shop:create_app()", "--pythonpath", here, **more)


@pytest.mark.parametrize("where", ["python", "statement"])
def test_a_retry_after_a_workers_death_pays_once_and_soon(
    slow_shop: Shop, pipe: Path, key: str, where: str
) -> None:
    before = slow_shop.balance()

    def pay() -> requests.Response:
        body = {"amount": 300, "where": where}
        return slow_shop.call("POST", "/slow-payments", key=key, body=body)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(pay)
        worker = int(pipe.read_text())  # comes when the payment is half made
        assert pay().status_code == 409
        os.kill(worker, signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(requests.ConnectionError):
            first.result()

    while (retry := pay()).status_code == 409:
        assert time.monotonic() - died < PROBE_AFTER + 1
        time.sleep(0.02)  # sooner than Retry-After asks for
    assert time.monotonic() - died < PROBE_AFTER + 1
    assert retry.status_code == 201
    assert retry.json()["attempt"] == 2
    assert pay().content == retry.content
    assert slow_shop.balance() == before - 300
