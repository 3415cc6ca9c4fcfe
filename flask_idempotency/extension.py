"""The extension object, and the one place that puts the parts together.

Configuration belongs to the extension object, state to the application: one ``Idempotency`` serves
several applications, and each has its own ``AppState`` in ``app.extensions["idempotency"]``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from flask import Blueprint, Flask
from redis import Redis, RedisCluster
from sqlalchemy import MetaData
from sqlalchemy.orm import scoped_session

from flask_idempotency.core.engine import MAX_WAITERS, DecisionEngine
from flask_idempotency.core.errors import ConfigurationError, shown
from flask_idempotency.core.keys import Scope
from flask_idempotency.core.ports import Lock
from flask_idempotency.core.records import Sealer
from flask_idempotency.drivers import raw_connection
from flask_idempotency.session import stray, transaction
from flask_idempotency.session.databases import most_connections
from flask_idempotency.session.sessions import Sessions, sessions_of
from flask_idempotency.stores import own_pool
from flask_idempotency.stores.in_test import RecordsInTest
from flask_idempotency.stores.lock import RedisLock, client_from_url
from flask_idempotency.stores.postgres.store import PostgresRecords
from flask_idempotency.stores.redis import RedisRecords
from flask_idempotency.stores.sealing import Sealed
from flask_idempotency.stores.sqlite import SqliteRecords
from flask_idempotency.stores.table import define_table
from flask_idempotency.web import run, views
from flask_idempotency.web.forms import idempotency_field
from flask_idempotency.web.routes import ROUTE, AppState, app_state, states
from flask_idempotency.web.settings import (
    NOT_GIVEN,
    OPTIONS,
    PROTECT_OPTIONS,
    PROTECTED_METHODS,
    RouteOptions,
    RunOptions,
    ScopeCallable,
    Skip,
    checked,
    checked_bind,
    read_options,
    read_settings,
    redis_prefix,
)
from flask_idempotency.web.signals import Event, send, store_failed

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class Idempotency:
    """Flask-Idempotency, for one or several applications.

    ``scope`` is a callable that returns whose key it is: the tenant's or user's id (``str``, ``int`` or
    ``UUID``; ``None`` or ``""`` if nobody is signed in); or ``None`` for an API with one tenant. It has
    no default. ``db`` is the application's Flask-SQLAlchemy object, by default the one registered on
    it, or its Flask-SQLAlchemy-Lite one with the ``metadata`` of the models. An application without
    them gives its ``session``, a ``scoped_session(sessionmaker(engine))``, and the ``metadata``.
    ``redis`` is a ready redis-py client in place of ``IDEMPOTENCY_REDIS_URL``. All are defaults for
    :meth:`init_app`.

    Raises :class:`ConfigurationError` for any wrong setting.
    """

    def __init__(
        self,
        app: Flask | None = None,
        db: Any = None,
        *,
        session: scoped_session[Any] | None = None,
        metadata: MetaData | None = None,
        scope: ScopeCallable | None = NOT_GIVEN,
        redis: Any = None,
    ) -> None:
        self._db, self._session, self._metadata = db, session, metadata
        self._scope, self._redis = scope, redis
        self._exempt_endpoints: set[str] = set()
        if app is not None:
            self.init_app(app)

    def init_app(
        self,
        app: Flask,
        db: Any = None,
        *,
        session: scoped_session[Any] | None = None,
        metadata: MetaData | None = None,
        scope: ScopeCallable | None = NOT_GIVEN,
        redis: Any = None,
    ) -> None:
        """Set the extension up on ``app``. Arguments: see the class."""
        if not isinstance(app, Flask):
            raise ConfigurationError(f"app is {shown(app)}; allowed: a flask.Flask object")
        if "idempotency" in app.extensions:
            raise ConfigurationError("this application already has an Idempotency")
        if db is None and session is None:
            db, session = self._db, self._session
        sessions = sessions_of(app, db, session, metadata or self._metadata)
        scope = self._scope if scope is NOT_GIVEN else scope
        if scope is NOT_GIVEN:
            raise ConfigurationError(
                "scope is missing: without it, a customer who happens to use another's key would get"
                " the other's stored response. Pass a callable that returns the tenant's or user's id,"
                " such as scope=lambda: g.account_id, or scope=None if this API really has only one"
                " tenant"
            )
        checked("scope", scope, OPTIONS["scope"])
        state = self._composed(app, sessions, scope, self._redis if redis is None else redis)
        sessions.let_join()
        for each in state.sessions.engines.values():
            transaction.hook(each, stray.hear)
        views.register(app, state)
        app.add_template_global(idempotency_field)
        app.extensions["idempotency"] = state

    def _composed(
        self, app: Flask, sessions: Sessions, scope: ScopeCallable | None, client: Any
    ) -> AppState:
        """Put stores, engine and settings together."""
        if client is not None and not isinstance(client, (Redis, RedisCluster)):
            raise ConfigurationError(
                f"redis is of {type(client)}; allowed: a redis.Redis, also a Sentinel's master_for(),"
                " or a redis.RedisCluster, not one of redis.asyncio"
            )
        settings = read_settings(app.config, redis_given=client is not None)
        key = checked_bind(sessions, settings, app.config.get("SQLALCHEMY_ENGINE_OPTIONS") or {})
        database = sessions.engines[key]
        # Without a table of ours, something must still stand for the bind whose writes are atomic.
        metadata = sessions.metadata_of(key)
        has_table = settings.store != "redis"
        there = metadata if has_table else MetaData(info=metadata.info)
        table = define_table(there, settings.table)
        if client is None and settings.redis_url:
            client = client_from_url(settings.redis_url)
        prefix = redis_prefix(settings, database)
        lock: Lock = Lock()
        if settings.store == "hybrid":
            tell = lambda error: send(store_failed, app, Event("", error=error))  # noqa: E731
            lock = RedisLock(client, prefix, on_failure=tell)
        keys = settings.encryption_keys
        sealer = Sealed(keys, accept_unsealed=settings.accept_unsealed) if keys else Sealer()
        records: Any = RedisRecords(client, prefix)
        if has_table:
            kind = SqliteRecords if database.dialect.name == "sqlite" else PostgresRecords
            records = kind(database, table)
        in_test = partial(RecordsInTest, records) if has_table else None
        most = most_connections(database)
        # At most half of a small pool is for those that wait: all other requests need the rest.
        waiters = MAX_WAITERS if most is None or most >= USUAL_POOL_SIZE else most // 2
        engine = DecisionEngine(records, lock, sealer, time, waiters)
        databases, exempt = (app, sessions, key, database, table, records), self._exempt_endpoints
        return AppState(*databases, scope, settings, exempt, lock, sealer, engine, in_test)

    def protect(
        self,
        target: Flask | Blueprint,
        *,
        methods: Collection[str] = PROTECTED_METHODS,
        skip: Skip | None = None,
        **options: Unpack[RouteOptions],
    ) -> None:
        """Protect the views of an application or a blueprint: every POST and PATCH, or ``methods``.

        It stands above the views' own decorators: a ``@login_required`` below it does not guard a
        replay. A view with ``@idempotent`` of its own keeps it. Left out are :meth:`exempt` targets,
        and each request for which ``skip(request)`` is true; that is called before the body is read and
        before the application's ``before_request`` functions. ``options`` are those of a route, without
        ``name``.

        Call it before the first request; for an application, after :meth:`init_app`. Raises
        ``ConfigurationError`` for a wrong option.
        """
        if not isinstance(target, (Flask, Blueprint)):
            raise ConfigurationError(
                f"protect() was given {shown(target)}; allowed: an application or a blueprint object"
            )
        if isinstance(target, Flask):
            app_state(target)  # else nothing would protect it
        route = read_options({**options, "methods": methods, "skip": skip}, PROTECT_OPTIONS)
        before = getattr(target, ROUTE, route)  # a factory that makes several applications
        if before is None or set(before.methods) != set(methods):
            raise ConfigurationError(
                f"{target.name} is exempt, or protected already with other methods: decide on one"
            )
        setattr(target, ROUTE, route)
        self._forget_known()

    def run(
        self,
        key: str | int | UUID,
        function: Callable[..., T],
        *args: Any,
        scope: Scope = NOT_GIVEN,
        payload: Any = None,
        **options: Unpack[RunOptions],
    ) -> T:
        """Run ``function(*args)`` at most once for each key, outside of a request or beside its view.

        Needs an application context. What the function writes in ``db.session`` commits together with
        its result, which must be JSON; every later call returns it again. ``scope`` says whose key it
        is (``str``, ``int``, ``UUID`` or None); it may be left out if the application has one tenant.
        ``payload`` is any JSON: the same key with another payload is rejected. ``options`` are those of
        a route that need no request; ``name`` is by default the function's module and name.

        Raises what the function raises, :class:`RequestInProgress`, :class:`KeyReused`,
        :class:`OperationInterrupted`, :class:`OperationFailed` where an operation that is not atomic
        has failed before, :class:`Retryable`, :class:`TransactionConflict`, :class:`StoreUnavailable`,
        and :class:`NotAtomic` where ``db.session`` holds changes that the caller has not committed.
        """
        return cast("T", run.run(key, function, args, scope, payload, options))

    def exempt(self, target: T) -> T:
        """Leave something out of :meth:`protect`: a view, a blueprint, or an endpoint by its name.

        Also a decorator for a view, a view class or one of its methods. The name is the full one, such
        as ``"shop.search"``. Call it before the first request. A view with ``@idempotent`` of its own
        stays protected. Raises ``ConfigurationError`` for anything else.
        """
        if isinstance(target, Flask) or not (isinstance(target, (Blueprint, str)) or callable(target)):
            raise ConfigurationError(
                f"exempt() was given {shown(target)}; allowed: a view, a blueprint, or the name of an"
                " endpoint"
            )
        is_protected = getattr(target, ROUTE, None) is not None
        if isinstance(target, Blueprint) and is_protected:
            raise ConfigurationError(f"the blueprint {target.name} is protected: decide on one")
        if isinstance(target, str):
            self._exempt_endpoints.add(target)
        elif not is_protected:
            setattr(target, ROUTE, None)
        self._forget_known()
        return target

    def _forget_known(self) -> None:
        """Look at each endpoint again: not with the first request that came, but with the next."""
        for state in list(states):
            state.known.clear()

    def console_blueprint(
        self,
        *,
        authorize: Callable[[], object],
        name: str = "operations",
    ) -> Blueprint:
        """The admin console, below ``/operations`` if it is not registered with another prefix.

        ``authorize()`` is called in each request to it. It returns the operator's name, which is
        recorded with what they do, or True, to let them in; False or None for a 403; or a response,
        such as a redirect to the sign-in page. Register the blueprint after :meth:`init_app`.

        Raises ``ConfigurationError`` without an ``authorize`` that can be called.
        """
        from flask_idempotency.console.blueprint import console_blueprint

        return self.exempt(console_blueprint(authorize, name))


USUAL_POOL_SIZE = 5
"""SQLAlchemy's, which may open ten connections more."""


def _leave_to_parent() -> None:
    """In a forked child, leave what the parent has begun, and its sockets, to the parent.

    gunicorn with ``--preload`` forks after ``create_app()``, which may have used the database, and a
    view may fork, too: two processes on one socket would read each other's results. The server is told
    nothing, as the parent still uses it. redis-py handles its own sockets.
    """
    raw_connection.let_go()
    transaction.leave_to_parent()
    own_pool.let_go()  # first: the end of the application's would close what is in them
    for state in list(states):
        for engine in state.sessions.engines.values():
            engine.dispose(close=False)


os.register_at_fork(after_in_child=_leave_to_parent)
