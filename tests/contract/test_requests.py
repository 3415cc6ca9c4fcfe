"""The same guarantees to clients on every store."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from flask import Flask

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent
from tests.sessions import make_db, protect
from tests.stores import prefix_of

STORES = ["sql", "redis", "hybrid", "postgres"]
TRANSACTIONAL = [store for store in STORES if store != "redis"]
CLIENTS = 16


class Shop:
    """An application with one view, which is what the test says."""

    def __init__(self, store, uri, redis_url, **config):
        self.app = Flask("shop")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_STORE=store, **config)
        if store in ("redis", "hybrid"):
            self.app.config["IDEMPOTENCY_REDIS_URL"] = redis_url
            self.app.config["IDEMPOTENCY_REDIS_PREFIX"] = prefix_of(uri)
        self.db = make_db()
        self.db.init_app(self.app)

        class Payment(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)
            note = sa.Column(sa.String(50), unique=True)

        self.Payment = Payment
        self.atomic = store != "redis"
        self.idempotency = protect(self.app, self.db, scope=None)
        with self.app.app_context():
            self.db.create_all()

    def view(self, does, **options):
        options = {"atomic": self.atomic, **options}
        view = idempotent(**options)(does)
        self.app.add_url_rule("/payments", "pay", view, methods=["POST"])

    def pay(self, note=None):
        self.db.session.add(self.Payment(note=note))
        self.db.session.commit()

    def post(self, key="key", **kwargs):
        return self.app.test_client().post(
            "/payments", headers={"Idempotency-Key": key}, **{"json": {}, **kwargs}
        )

    def count(self):
        with self.app.app_context(), self.db.engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.count(self.Payment.id)))


@pytest.fixture(params=STORES)
def store(request):
    return request.param


@pytest.fixture
def shop(store, tmp_path, databases, redis_server, probing_at_once):
    on_postgres = store in ("hybrid", "postgres")
    uri = databases.take() if on_postgres else f"sqlite:///{tmp_path}/shop.db"
    shop = Shop(store, uri, redis_server.url)
    yield shop
    if on_postgres:
        databases.give_back(uri)
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0
        shop.db.engine.dispose()


def test_it_runs_once_and_replays(shop):
    runs = []

    def view():
        runs.append(current_operation.attempt)
        shop.pay()
        return b"\x00\xff", 201, [("X-A", "1"), ("X-A", "2")]

    shop.view(view)
    first, retry = shop.post(), shop.post()
    assert (first.data, first.status_code) == (b"\x00\xff", 201)
    assert (retry.data, retry.status_code) == (b"\x00\xff", 201)
    assert first.headers.getlist("X-A") == retry.headers.getlist("X-A") == ["1", "2"]
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert shop.post(json={"other": 1}).status_code == 422
    assert (runs, shop.count()) == ([1], 1)


def test_many_at_once_run_once(shop):
    barrier = threading.Barrier(CLIENTS)
    shop.view(lambda: (shop.pay(), ({}, 201))[1])

    def client(_number):
        barrier.wait(10)
        return shop.post().status_code

    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = set(pool.map(client, range(CLIENTS)))
    assert statuses <= {201, 409}
    assert shop.post().status_code == 201
    assert shop.count() == 1


def test_many_keys_at_once_run_once_each(shop):
    shop.view(lambda: (shop.pay(), ({}, 201))[1])
    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(lambda n: shop.post(f"key-{n % 4}").status_code, range(CLIENTS)))
    assert set(statuses) <= {201, 409}
    assert [shop.post(f"key-{n}").status_code for n in range(4)] == [201] * 4
    assert shop.count() == 4


def test_a_duplicate_is_refused_while_the_first_runs(shop):
    inside, go_on = threading.Event(), threading.Event()

    def view():
        inside.set()
        assert go_on.wait(10)
        return {}, 201

    shop.view(view)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.post)
        assert inside.wait(10)
        duplicate = shop.post()
        assert (duplicate.status_code, shop.post(json={"other": 1}).status_code) == (409, 422)
        go_on.set()
        assert first.result().status_code == 201
    assert shop.post().status_code == 201


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_an_error_rolls_everything_back_and_the_retry_runs(shop):
    answers = [500, 201]

    def view():
        shop.pay()
        return {"attempt": current_operation.attempt}, answers.pop(0)

    shop.view(view)
    assert shop.post().status_code == 500
    assert shop.count() == 0
    assert shop.post().json == shop.post().json == {"attempt": 2}
    assert shop.count() == 1


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_a_transaction_ended_past_us_is_no_success(shop):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False

    def view():
        shop.pay()
        try:
            shop.db.session.execute(sa.text("COMMIT"))
        except (NotAtomic, sa.exc.SQLAlchemyError):
            shop.db.session.rollback()
            raise
        return {}, 201

    shop.view(view)
    assert shop.post().status_code == 500
    assert shop.count() == 0


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_transaction_that_sqlite_itself_rolls_back_commits_nothing_more(shop):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    twice = "insert or rollback into payment (id, note) values (1, 'a'), (1, 'b')"

    def view():
        shop.pay("before")
        with pytest.raises(sa.exc.SQLAlchemyError):
            shop.db.session.execute(sa.text(twice))
        shop.db.session.rollback()
        shop.pay("after")
        return {}, 201

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert shop.count() == 0


def test_a_failed_transaction_is_no_success(postgres):
    shop = Shop("postgres", postgres.database("failed"), "", PROPAGATE_EXCEPTIONS=False)

    def view():
        shop.pay()
        with pytest.raises(sa.exc.ProgrammingError):
            current_operation.connection.execute(sa.text("select * from nowhere"))
        return {}, 201

    shop.view(view)
    assert shop.post().status_code == 500
    assert shop.count() == 0
    with shop.app.app_context():
        shop.db.engine.dispose()


@pytest.mark.parametrize("words", ["COMMIT", "select 1; -- x\nEND"])
def test_postgres_is_not_told_to_end_the_transaction(words, postgres):
    shop = Shop("postgres", postgres.database("ended"), "", PROPAGATE_EXCEPTIONS=True)

    def view():
        shop.pay()
        shop.db.session.execute(sa.text(words))
        return {}, 201

    shop.view(view)
    with pytest.raises(NotAtomic, match="begins, ends or isolates a transaction"):
        shop.post()
    assert shop.count() == 0
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0
        shop.db.engine.dispose()


def test_what_is_not_atomic_keeps_its_steps(shop):
    calls = []

    def view():
        current_operation.step("charge", calls.append, 1)
        if current_operation.attempt == 1:
            raise SystemExit
        return {"attempt": current_operation.attempt}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    with pytest.raises(SystemExit):
        shop.post()
    assert shop.post().json == shop.post().json == {"attempt": 2}
    assert calls == [1]


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
def test_a_step_may_commit_with_its_writes(shop):
    def view():
        current_operation.step("pay", shop.pay, atomic=True)
        if current_operation.attempt == 1:
            raise SystemExit
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    with pytest.raises(SystemExit):
        shop.post()
    assert shop.post().status_code == 201
    assert shop.count() == 1


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_redis_refuses_to_be_atomic(shop, store, tmp_path, redis_server):
    shop.view(dict, atomic=True)
    shop.app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises(ConfigurationError, match="atomic, which the store 'redis' cannot be"):
        shop.post()
    with shop.app.app_context(), pytest.raises(ConfigurationError, match="cannot be"):
        shop.idempotency.run("key", dict, name="x")


@pytest.mark.parametrize("wrong", [object(), "mysql", 5, dict])
def test_what_is_no_store_is_named(tmp_path, wrong):
    allowed = "IDEMPOTENCY_STORE is .*; allowed: 'hybrid', 'postgres', 'redis' or 'sql'"
    with pytest.raises(ConfigurationError, match=allowed):
        Shop(wrong, f"sqlite:///{tmp_path}/shop.db", "")
