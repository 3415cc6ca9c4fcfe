"""The application that every case of the differential suite runs in, plain or protected.

Both are made by the same lines. What a case brings (its view, what comes before, above and after it)
is looked up when a request comes, so that one pair of applications serves many cases.

The plain application remembers its answers in a dictionary and gives them again, without running the
view: so both can be sent the same four requests, and whatever an application does around its view on
a retry happens in both.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg2.extensions
import sqlalchemy as sa
from flask import Flask, Response, g, got_request_exception, request

from flask_idempotency import idempotent
from flask_idempotency.core.errors import sqlstate
from servers import plain_dsn
from tests.drivers import own_cursor, with_driver
from tests.sessions import factory_of, left_behind, make_db, protect

if TYPE_CHECKING:
    from tests.differential.harness import Case

NOT_KEPT = {401, 403, 408, 425, 429}
LOCK_TIMEOUT = "500ms"
"""How long a view may wait for itself, in both applications."""

LEAKED = "a connection was not given back"
LEFT = "a session was not removed"

RECORDS = "and relname !~ '^idempotency_record'"

TABLES = f"""
    select quote_ident(nspname) || '.' || quote_ident(relname)
    from pg_class join pg_namespace n on n.oid = relnamespace
    where relkind = 'r' and nspname !~ '^(pg_|information_schema)' {RECORDS}
    order by 1
"""

FUNCTIONS = f"""
    set lock_timeout = '3s';
    create function pg_temp.rows() returns table (name text, content text) language plpgsql as $$
    declare found_table text; begin
        for found_table in {TABLES} loop
            name := replace(found_table, 'public.', '');
            content := null;
            return next;
            return query execute format(
                'select %L, (to_jsonb(t) - %L)::text from %s t order by 2', name, 'id', found_table
            );
        end loop;
    end $$;
    create function pg_temp.empty() returns void language plpgsql as $$
    declare found_table text; begin
        for found_table in {TABLES.replace(RECORDS, "")} loop
            execute 'delete from ' || found_table;
        end loop;
        perform setval(c.oid, 1, false) from pg_class c join pg_namespace n on n.oid = relnamespace
            where relkind = 'S' and nspname !~ '^pg_';
        insert into account (name, balance) values ('alice', 100), ('bob', 100);
    end $$;
"""
"""For the owner's connection: each is one message where many would be sent."""

SHOW = """
    select coalesce(nullif(current_setting(name, true), ''), '-')
    from unnest(cast(:names as text[])) with ordinality as names (name, number) order by number
"""

# What psycopg prepares by and by, and what is prepared for the extension, is in nobody's way.
STATE = """
    select 'setting ' || name || '=' || setting from pg_settings
        where source = 'session' and name !~ '^transaction_'
    union all select 'role ' || current_setting('role') where current_setting('role') <> 'none'
    union all select 'user ' || session_user where session_user <> 'postgres'
    union all select 'setting ' || name || '=' || current_setting(name, true)
        from unnest(array['app.tenant', 'app.note']) name where current_setting(name, true) <> ''
    union all select 'temporary table ' || relname from pg_class
        where relnamespace = pg_my_temp_schema() and relkind in ('r', 'p', 'v', 'S')
    union all select 'lock ' || locktype || ' ' || mode || ' ' || coalesce(relation::regclass::text, '')
            || coalesce(objid::text, '') from pg_locks
        where pid = pg_backend_pid() and locktype <> 'virtualxid'
            and (relation is null or relation >= 16384)
    union all select 'prepared statement ' || name from pg_prepared_statements
        where name !~ '^(_pg3|idempotency)_'
    union all select 'cursor ' || name from pg_cursors
    union all select 'channel ' || name from pg_listening_channels() name
"""


DEFAULTS = {None, False, "READ_COMMITTED", psycopg2.extensions.ISOLATION_LEVEL_READ_COMMITTED}
"""What the server does unless told otherwise, which the driver may have been told or not."""

ATTRIBUTES = (
    *("autocommit", "isolation_level", "readonly", "read_only", "deferrable", "status"),
    *("cursor_factory", "server_cursor_factory", "row_factory"),
)


@dataclass(frozen=True)
class Error:
    """An exception, without what differs from run to run."""

    name: str
    code: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.name}[{self.code}]: {self.message}"

    @classmethod
    def of(cls, error: BaseException) -> Error:
        """The class, the SQLSTATE if there is one, and the first line of the message."""
        code = sqlstate(error) or sqlstate(getattr(error, "orig", None))
        message = re.sub(r"0x[0-9a-f]{4,}|c_[0-9a-f]+_[0-9a-f]+", "0x…", str(error))
        if type(error).__name__ != "NotAtomic":
            message = message.partition("\n")[0]
        return cls(type(error).__name__, code, message)


@dataclass(frozen=True)
class Reply:
    """What came back: an answer, or an exception that no handler held. And what the log would say."""

    status: int | None
    body: str
    content_type: str | None = None
    replayed: bool = False
    errors: tuple[Error, ...] = ()
    raised: Error | None = None

    def __str__(self) -> str:
        body = "…" if self.body.startswith("<!doctype") else self.body.strip()
        return f"{self.status} {body}" if self.raised is None else f"raised {self.raised}"


class World:
    """One application on a database of its own. ``protected`` says which of the two it is."""

    def __init__(
        self, url: str, driver: str, case: Case, *, protected: bool, redis_url: str | None = None
    ) -> None:
        self.url, self.protected, self.case = url, protected, case
        self.notes: list[str] = []
        self.heard: Counter[str] = Counter()
        self.kept: dict[str, tuple[int, bytes, str | None]] = {}
        self._made: tuple[int, bytes, str | None] | None = None
        self.first_state: frozenset[str] | None = None
        self.here: dict[str, Any] = {}
        """For what the functions of one case tell each other; emptied before each case."""
        self.db = make_db()
        self._define_models()
        self.app = Flask("differential")
        options = {
            "pool_size": case.pool,
            "max_overflow": 0,
            "pool_timeout": 2,
            "connect_args": {"options": f"-c lock_timeout={LOCK_TIMEOUT}"},
            **(case.engine_options or {}),
        }
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=with_driver(url, driver),
            SQLALCHEMY_ENGINE_OPTIONS=options,
            PROPAGATE_EXCEPTIONS=False,
            IDEMPOTENCY_STORE="hybrid" if redis_url else "postgres",
            IDEMPOTENCY_REDIS_URL=redis_url,
        )
        self.app.logger.disabled = True
        self.db.init_app(self.app)
        if self.protected:
            protect(self.app, self.db, scope=None)
        self._add_routes(case)
        with self.app.app_context():
            self.engine = self.db.engine
            self.db.create_all()
        self.admin = psycopg2.connect(plain_dsn(url))
        self.admin.autocommit = True
        self.admin_run(FUNCTIONS)
        if case.setup is not None:
            with self.app.app_context():
                case.setup(self)
        for name in ("after_commit", "after_rollback"):
            listener = lambda *_, name=name: self.heard.update([name])  # noqa: E731
            sa.event.listen(factory_of(self.app, self.db), name, listener)

    def _define_models(self) -> None:
        db = self.db

        class Payment(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)
            note = sa.Column(sa.String, unique=True)

        class Account(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            name = sa.Column(sa.String, unique=True)
            balance = sa.Column(sa.Integer, sa.CheckConstraint("balance >= 0"), nullable=False)

        class Audit(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            text = sa.Column(sa.String)

        self.Payment, self.Account, self.Audit = Payment, Account, Audit

    def _add_routes(self, case: Case) -> None:
        app = self.app

        @app.before_request
        def before() -> None:
            if request.path == "/payments" and self.case.before is not None:
                self.case.before(self)

        @app.after_request
        def after(response: Response) -> Response:
            if request.path == "/payments" and self.case.after_request is not None:
                changed = self.case.after_request(self, response)
                return changed if isinstance(changed, Response) else response
            return response

        @app.teardown_request
        def teardown(error: BaseException | None) -> None:
            if request.path == "/payments" and self.case.teardown is not None:
                self.case.teardown(self, error)

        view: Callable[[], Any] = self._view
        if self.protected:
            view = idempotent(atomic=case.atomic)(view)

        @wraps(view)
        def pay() -> Any:
            return view() if self.case.above is None else self.case.above(self, view)

        def write() -> Any:
            self.db.session.add(self.Payment(amount=99))
            self.db.session.commit()
            return {"count": self.db.session.query(self.Payment).count()}, 201

        app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        app.add_url_rule("/write", "write", write, methods=["POST"])

    def _view(self) -> Any:
        key = request.headers["Idempotency-Key"]
        if not self.protected:
            if key in self.kept:
                status, body, content_type = self.kept[key]
                return Response(body, status, content_type=content_type)
            self._made = None
        g.view_ran = True
        result = self.case.view(self) or ({"ok": True}, 201)
        if self.protected:
            return result
        response = self.app.make_response(result)
        self._made = (response.status_code, response.get_data(), response.content_type)
        return response

    # What views and their surroundings use.

    @property
    def session(self) -> Any:
        return self.db.session

    @property
    def view_ran(self) -> bool:
        """Whether the view has run in this request: it has not on a replay."""
        return bool(g.get("view_ran", False))

    def sql(self, statement: str, **values: Any) -> Any:
        """Run SQL in ``db.session``; gives the first column of the first row, or None."""
        result = self.session.execute(sa.text(statement), values)
        return result.scalar() if result.returns_rows else None

    def show(self, *names: str) -> None:
        values = self.session.execute(sa.text(SHOW), {"names": list(names)}).scalars()
        self.notes += [f"{name} {value}" for name, value in zip(names, values, strict=True)]

    def pay(self, amount: int = 1, note: str | None = None) -> Any:
        payment = self.Payment(amount=amount, note=note)
        self.session.add(payment)
        return payment

    def audit(self, text: str = "seen") -> None:
        self.session.add(self.Audit(text=text))

    def commit(self) -> None:
        self.session.commit()

    def note(self, what: Any) -> None:
        self.notes.append(str(what))

    @contextlib.contextmanager
    def catching(self, *kinds: type[BaseException]) -> Iterator[None]:
        """Catch what the block raises, and note it (or that it raised nothing)."""
        try:
            yield
        except Exception as error:
            if kinds and not isinstance(error, kinds):
                raise
            self.note(Error.of(error))
        else:
            self.note("no error")

    # What the harness uses, from outside.

    def admin_run(self, statement: str, *values: Any) -> list[Any]:
        """Run SQL as the owner, on a connection that the application knows nothing of."""
        with self.admin.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def begin(self, case: Case) -> None:
        """Empty the tables for the next case."""
        self.case = case
        self.kept.clear()
        self.here.clear()
        self.admin_run("select pg_temp.empty()")

    def rows(self) -> dict[str, list[str]]:
        """The rows of the application's tables, without their ``id``, in the order of their text."""
        found: dict[str, list[str]] = {}
        for table, row in self.admin_run("select * from pg_temp.rows()"):
            found.setdefault(table, []).extend([] if row is None else [row])
        return found

    def records(self) -> list[tuple[str, int | None]]:
        query = "select state, status from idempotency_record where name = 'pay' order by created_at"
        return self.admin_run(query) if self.protected else []

    def state(self) -> frozenset[str]:
        """What is on the pooled connections now."""
        pool: Any = self.engine.pool
        if left_behind(self.db):
            return frozenset({LEFT})
        if pool.checkedout():
            return frozenset({LEAKED})
        lines: set[str] = set()
        with contextlib.ExitStack() as stack:
            for _ in range(max(1, pool.checkedin())):
                raw = self.engine.raw_connection()
                stack.callback(raw.close)
                lines |= _state(raw.driver_connection)
        return frozenset(lines)

    def send(self, key: str, path: str = "/payments") -> Reply:
        errors: list[Error] = []
        hear = lambda _app, exception, **_: errors.append(Error.of(exception))  # noqa: E731
        with got_request_exception.connected_to(hear, self.app):
            try:
                headers = {"Idempotency-Key": key}
                answer = self.app.test_client().post(path, json={"amount": 5}, headers=headers)
            except Exception as error:
                return Reply(None, "", errors=tuple(errors), raised=Error.of(error))
        replayed = answer.headers.get("Idempotent-Replayed") == "true"
        if not self.protected and path == "/payments":
            replayed = key in self.kept
            if not replayed and self._keeps(answer.status_code):
                made = (answer.status_code, answer.data, answer.content_type)
                self.kept[key] = self._made or made
        return Reply(answer.status_code, answer.text, answer.content_type, replayed, tuple(errors))

    def _keeps(self, status: int) -> bool:
        """Whether an answer is kept: the rule of the contract."""
        if status >= 500:
            return not self.case.atomic
        return status not in NOT_KEPT

    def forget_connections(self) -> None:
        """Let the next case begin with connections that nobody has used."""
        self.engine.dispose()
        self.first_state = None

    def close(self) -> None:
        with self.app.app_context():
            self.engine.dispose()
        self.admin.close()


def _state(driver: Any) -> set[str]:
    lines = set()
    if (status := driver.info.transaction_status) != 0:
        lines.add(f"a transaction, of status {status}")
        driver.rollback()
    for name in ATTRIBUTES:
        value = getattr(driver, name, None)
        value = getattr(value, "name", value)  # psycopg's levels have other numbers than psycopg2's
        if value not in DEFAULTS:
            lines.add(f"driver's {name} {value}")
    with own_cursor(driver) as cursor:
        cursor.execute(STATE)
        lines |= {line for (line,) in cursor.fetchall()}
    if isinstance(driver, psycopg.Connection):
        driver.rollback()
    return lines
