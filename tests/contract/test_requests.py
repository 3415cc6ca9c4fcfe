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

    def __init__(self, store, uri, redis_url, *, scope=None, tables=True, **config):
        self.app = Flask("shop")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_STORE=store)
        if store in ("redis", "hybrid"):
            self.app.config["IDEMPOTENCY_REDIS_URL"] = redis_url
            self.app.config["IDEMPOTENCY_REDIS_PREFIX"] = prefix_of(uri)
        self.app.config.update(config)
        self.db = make_db()
        self.db.init_app(self.app)

        class Payment(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)
            note = sa.Column(sa.String(50), unique=True)

        self.Payment = Payment
        self.atomic = store != "redis"
        self.idempotency = protect(self.app, self.db, scope=scope)
        with self.app.app_context():
            self.engine = self.db.engine
            if tables:
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

    def while_it_runs(self, does, key="key", **options):
        """Call a function while a view runs, which then succeeds and is replayed."""
        inside, go_on = threading.Event(), threading.Event()

        def view():
            inside.set()
            assert go_on.wait(10)
            return {}, 201

        self.view(view, **options)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.post, key)
            try:
                assert inside.wait(10)
                does()
            finally:
                go_on.set()
            assert first.result().status_code == 201
        assert self.post(key).headers["Idempotent-Replayed"] == "true"

    def count(self):
        with self.engine.connect() as connection:
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
    assert shop.engine.pool.checkedout() == 0
    shop.engine.dispose()


@pytest.mark.parametrize("keys", [1, 4])
def test_many_at_once_run_once_for_each_key(shop, keys):
    barrier = threading.Barrier(CLIENTS)
    shop.view(lambda: (shop.pay(), ({}, 201))[1])

    def client(number):
        barrier.wait(10)
        return shop.post(f"key-{number % keys}").status_code

    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = set(pool.map(client, range(CLIENTS)))
    assert statuses <= {201, 409}
    assert [shop.post(f"key-{n}").status_code for n in range(keys)] == [201] * keys
    assert shop.count() == keys


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
@pytest.mark.parametrize(
    ("raises", "options"),
    [(False, {}), (True, {}), (True, {"store": lambda _response: True})],
    ids=["returned", "raised", "raised where all is kept"],
)
def test_an_error_rolls_everything_back_and_the_retry_runs(shop, raises, options):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False

    def view():
        shop.pay()
        first = current_operation.attempt == 1
        if first and raises:
            raise LookupError
        return {"attempt": current_operation.attempt}, 500 if first else 201

    shop.view(view, **options)
    assert shop.post().status_code == 500
    assert shop.count() == 0
    assert shop.post().json == shop.post().json == {"attempt": 2}
    assert shop.count() == 1


def end_past_us(shop):
    try:
        shop.db.session.execute(sa.text("COMMIT"))
    except (NotAtomic, sa.exc.SQLAlchemyError):
        shop.db.session.rollback()
        raise


def fail(shop):
    with pytest.raises(sa.exc.SQLAlchemyError):
        current_operation.connection.execute(sa.text("select * from nowhere"))


def let_sqlite_roll_back(shop):
    twice = "insert or rollback into payment (id, note) values (1, 'a'), (1, 'b')"
    with pytest.raises(sa.exc.SQLAlchemyError):
        shop.db.session.execute(sa.text(twice))
    shop.db.session.rollback()
    shop.pay("after")


@pytest.mark.parametrize(
    ("store", "does", "said"),
    [
        ("sql", end_past_us, ""),
        ("sql", let_sqlite_roll_back, ""),
        *((store, end_past_us, "begins, ends or isolates") for store in ("hybrid", "postgres")),
        ("postgres", fail, "caught the error of a statement"),
    ],
    indirect=["store"],
)
def test_a_transaction_that_ended_or_failed_in_the_view_is_no_success(shop, caplog, does, said):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False

    def view():
        shop.pay("before")
        does(shop)
        return {}, 201

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert shop.count() == 0
    assert said in caplog.text


@pytest.mark.parametrize(
    ("store", "atomic"),
    [*((store, False) for store in STORES), *((store, True) for store in TRANSACTIONAL)],
    indirect=["store"],
)
def test_what_is_not_atomic_keeps_its_steps_and_their_writes(shop, atomic):
    calls = []

    def view():
        current_operation.step("pay", lambda: calls.append(1) or shop.pay(), atomic=atomic)
        if current_operation.attempt == 1:
            raise SystemExit
        return {"attempt": current_operation.attempt}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    with pytest.raises(SystemExit):
        shop.post()
    assert shop.post().json == shop.post().json == {"attempt": 2}
    assert (calls, shop.count()) == ([1], 1)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_redis_refuses_to_be_atomic(shop):
    shop.view(dict, atomic=True)
    shop.app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises(ConfigurationError, match="atomic, which the store 'redis' cannot be"):
        shop.post()
    with shop.app.app_context(), pytest.raises(ConfigurationError, match="cannot be"):
        shop.idempotency.run("key", dict, name="x")
