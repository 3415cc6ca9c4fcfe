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
from weakref import WeakSet

from flask import Blueprint, Flask
from redis import Redis, RedisCluster
from sqlalchemy import Engine, MetaData
from sqlalchemy.orm import scoped_session

from flask_idempotency.core.engine import MAX_WAITERS, DecisionEngine
from flask_idempotency.core.errors import ConfigurationError, shown
from flask_idempotency.core.keys import Scope
from flask_idempotency.core.ports import Lock, Records, Sealer
from flask_idempotency.drivers import raw_connection
from flask_idempotency.session import joining, stray, transaction
from flask_idempotency.session.after_commit import after_commit
from flask_idempotency.session.databases import most_connections
from flask_idempotency.session.sources import Sessions, sessions_of
from flask_idempotency.stores import own_pool
from flask_idempotency.stores.postgres.in_test import RecordsInTest
from flask_idempotency.stores.postgres.store import PostgresRecords
from flask_idempotency.stores.redis.client import client_from_url
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.stores.redis.store import RedisRecords
from flask_idempotency.stores.sealing import Sealed
from flask_idempotency.stores.sqlite.store import SqliteRecords
from flask_idempotency.stores.table import define_steps, define_table
from flask_idempotency.web import hooks, routes, run
from flask_idempotency.web.forms import idempotency_field
from flask_idempotency.web.routes import AppState, Protections, set_state, states
from flask_idempotency.web.settings import (
    NOT_GIVEN,
    PROTECTED_METHODS,
    RouteOptions,
    RunOptions,
    ScopeCallable,
    Settings,
    Skip,
    bind_of,
    check_database,
    read_protection,
    read_settings,
    redis_prefix,
)
from flask_idempotency.web.signals import Event, send, store_failed

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class Idempotency:
    """Flask-Idempotency, for one or several applications.

    ``scope`` says whose an idempotency key is: a callable that returns the tenant's or user's id
    (``str``, ``int`` or ``UUID``; ``None`` or ``""`` if nobody is signed in), or ``None`` for an API
    with one tenant. It has no default. ``db`` is the application's Flask-SQLAlchemy object, or its
    Flask-SQLAlchemy-Lite one with the ``metadata`` of the models; the default is the one registered on
    the application. An application without them gives its ``session``, a
    ``scoped_session(sessionmaker(engine))``, and the ``metadata``. ``redis`` is a ready redis-py client
    in place of ``IDEMPOTENCY_REDIS_URL``. These arguments are the defaults for :meth:`init_app`.

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
        self._protections = Protections()
        self._fresh: WeakSet[Flask | Blueprint] = WeakSet()  # protected since the last init_app()
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
        scope = _checked_scope(self._scope if scope is NOT_GIVEN else scope)
        client = _checked_client(self._redis if redis is None else redis)
        settings = read_settings(app.config, redis_given=client is not None)
        state = _compose(app, sessions, scope, settings, client, self._protections)
        joining.install(sessions)
        for each in state.engines.values():
            transaction.hook(each, stray.hear)
        hooks.register(app, state)
        app.add_template_global(idempotency_field)
        set_state(app, state)
        self._fresh.clear()

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
        replay, so ``scope`` must find nobody for an unauthenticated caller (401), or
        ``authorize_replay`` refuse. A view with ``@idempotent`` of its own keeps it; :meth:`exempt`
        targets are left out, and so is a request for which ``skip(request)`` is true. It is called once
        for each request, before the body is read and before the application's own ``before_request``
        functions.

        Call it before the first request, before or after the views and the blueprint are registered;
        for an application, after :meth:`init_app`.
        Raises ``ConfigurationError`` for a wrong option, and for a call that comes too late or would do
        nothing. A ``name`` is for one view alone: if it covers several, the first request to one of
        them raises ``ConfigurationError``.
        """
        if not isinstance(target, (Flask, Blueprint)):
            raise ConfigurationError(
                f"protect() was given {shown(target)}; allowed: an application or a blueprint object"
            )
        if isinstance(target, Flask) and not any(state.app is target for state in self._states()):
            raise ConfigurationError(
                f"this Idempotency is not set up on the application {target.name}: call"
                " init_app() on it before protect()"
            )
        route = read_protection(methods, skip, options)
        if hasattr(target, routes.EXEMPT):
            raise ConfigurationError(f"the blueprint {target.name} would be both protected and exempt")
        is_known = target in self._protections.routes
        # A factory that makes several applications may protect its blueprint for each of them.
        if is_known and (isinstance(target, Flask) or target in self._fresh):
            raise ConfigurationError(
                f"{target.name} is protected already: call protect() once for each"
            )
        self._refuse_late("protect", target, is_known)
        self._protections.routes[target] = route
        self._fresh.add(target)

    def run(
        self,
        key: str,
        function: Callable[..., T],
        *args: Any,
        scope: Scope = NOT_GIVEN,
        payload: Any = None,
        **options: Unpack[RunOptions],
    ) -> T:
        """Run ``function(*args)`` at most once for each key, outside of a request or beside its view.

        For webhook consumers, queue workers and scripts, inside an application context. What the
        function writes in ``db.session`` commits together with its result; with ``atomic=False`` it
        may use :data:`current_operation`'s steps. The result must be JSON; every later call returns it
        again. ``scope`` says whose key it is (``str``, ``int``, ``UUID`` or None); it may be left out
        if the application has one tenant. ``payload`` is any JSON: the same key with another payload is
        rejected. Options: ``ttl``, ``wait``, ``namespace``, ``name`` (default: the function's module
        and name; needed where those differ between processes, as in a script),
        ``other_binds``, ``atomic``, ``max_attempts``, ``refuse_old_keys``, ``lease``,
        ``on_interrupted``.

        Raises what the function raises, :class:`RequestInProgress`, :class:`KeyReused`,
        :class:`OperationInterrupted`, :class:`StoreUnavailable`, and :class:`OperationFailed` where an
        operation that is not atomic has failed before.
        """
        return cast("T", run.run(key, function, args, scope, payload, options))

    def after_commit(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
        """:func:`flask_idempotency.after_commit` with arguments for the function."""
        after_commit(partial(function, *args, **kwargs))

    def exempt(self, target: T) -> T:
        """Leave something out of :meth:`protect`: a view, a blueprint, or an endpoint by its name.

        Also a decorator for a view function, a view class or one of its methods. The name is the full
        one, such as ``"shop.search"``. Call it before the first request, before or after the target is
        registered.

        Raises ``ConfigurationError`` for anything else, and for a call that comes too late. A missing
        target fails ``flask idempotency check``; a view with ``@idempotent`` of its own also raises in
        its first request.
        """
        if isinstance(target, str):
            self._refuse_late("exempt", target, target in self._protections.exempt_endpoints)
            self._protections.exempt_endpoints.add(target)
            return target
        if isinstance(target, Flask) or not (isinstance(target, Blueprint) or callable(target)):
            raise ConfigurationError(
                f"exempt() was given {shown(target)}; allowed: a view, a blueprint, or the name of an"
                " endpoint"
            )
        if isinstance(target, Blueprint) and target in self._protections.routes:
            raise ConfigurationError(f"the blueprint {target.name} is to be both protected and exempt")
        self._refuse_late("exempt", target, hasattr(target, routes.EXEMPT))
        try:
            self._protections.exempt.add(target)
            setattr(target, routes.EXEMPT, True)
        except (AttributeError, TypeError):
            raise ConfigurationError(
                f"{routes.name_of(target)} cannot be marked: exempt it by the name of its endpoint"
            ) from None
        return target

    def console_blueprint(
        self,
        *,
        authorize: Callable[[], object],
        name: str = "operations",
    ) -> Blueprint:
        """The operator's page, below ``/operations`` if it is not registered with another prefix.

        ``authorize()`` is called in each request to it, inside the request. It returns the operator's
        name, which is recorded with what they do, or True, to let them in; False or None for a 403; or
        a response, such as a redirect to the sign-in page. It has no default. Register the blueprint
        after :meth:`init_app`, and set ``SECRET_KEY``, which signs its forms.

        Raises ``ConfigurationError`` without an ``authorize`` that can be called.
        """
        from flask_idempotency.console.blueprint import console_blueprint

        return self.exempt(console_blueprint(authorize, name))

    def _states(self) -> list[AppState]:
        """Those of the applications that this extension was set up on."""
        return [state for state in states() if state.protections is self._protections]

    def _refuse_late(self, what: str, target: Any, is_known: bool) -> None:
        """Raise ``ConfigurationError`` if every application concerned has started to serve."""
        mine = self._states()
        if isinstance(target, Flask):
            mine = [state for state in mine if state.app is target]
        is_there = any(routes.is_registered(state, target) for state in mine)
        if is_there and not is_known and all(state.has_served for state in mine):
            raise ConfigurationError(
                f"{what}() comes too late: the application {mine[0].app.name} has served its first"
                " request"
            )


def _checked_scope(scope: Any) -> ScopeCallable | None:
    if scope is NOT_GIVEN:
        raise ConfigurationError(
            "scope is missing. It says whose an idempotency key is: without it, a customer who happens"
            " to use another's key would get the other's stored response. Pass a callable that returns"
            " the tenant's or user's id, such as scope=lambda: g.account_id, or scope=None if this API"
            " really has only one tenant"
        )
    if scope is not None and not callable(scope):
        raise ConfigurationError(
            f"scope is {shown(scope)}; allowed: a callable, or None for one tenant"
        )
    return scope  # type: ignore[no-any-return]


def _checked_client(client: Any) -> Any:
    if client is not None and not isinstance(client, (Redis, RedisCluster)):
        raise ConfigurationError(
            f"redis is a {type(client).__module__}.{type(client).__name__}; allowed: a redis.Redis"
            " (also a Sentinel's master_for(...)) or a redis.RedisCluster, not one of redis.asyncio"
        )
    return client


def _compose(
    app: Flask,
    sessions: Sessions,
    scope: ScopeCallable | None,
    settings: Settings,
    client: Any,
    protections: Protections,
) -> AppState:
    """Put stores, engine and settings together."""
    key = bind_of(sessions, settings)
    database = sessions.engines[key]
    options = app.config.get("SQLALCHEMY_ENGINE_OPTIONS") or {}
    check_database(database, settings.store, options if key is None else {})
    # Without a table of ours, something must still stand for the bind whose writes are atomic.
    metadata = sessions.metadata_of(key)
    there = metadata if settings.has_table else MetaData(info=metadata.info)
    table = define_table(there, settings.table)
    make_client: Callable[[], Any] = lambda: client  # noqa: E731
    if client is None and settings.redis_url:
        make_client = client_from_url(settings.redis_url)
    prefix = redis_prefix(settings, database)
    lock: Lock = Lock()
    if settings.store == "hybrid":
        tell = lambda error: send(store_failed, app, Event("", error=error))  # noqa: E731
        lock = RedisLock(make_client, prefix, on_failure=tell)
    keys = settings.encryption_keys
    sealer = Sealed(keys, accept_unsealed=settings.accept_unsealed) if keys else Sealer()
    records: Records = RedisRecords(make_client, prefix)
    if settings.has_table:
        kind = SqliteRecords if database.dialect.name == "sqlite" else PostgresRecords
        records = kind(database, table, define_steps(table))
    own, in_test = records, None
    if isinstance(records, PostgresRecords):
        own, in_test = records.apart(), partial(RecordsInTest, records)
    engine = DecisionEngine(records, lock, sealer, time, _max_waiters(database))
    databases = (app, sessions, key, database, table, records)
    return AppState(*databases, scope, settings, protections, lock, sealer, engine, own, in_test)


USUAL_POOL_SIZE = 5
"""SQLAlchemy's, which may open ten connections more."""


def _max_waiters(engine: Engine) -> int:
    """At most half of a small pool is for those that wait: all other requests need the rest."""
    most = most_connections(engine)
    return MAX_WAITERS if most is None or most >= USUAL_POOL_SIZE else most // 2


def _leave_to_parent() -> None:
    """In a forked child, leave what the parent has begun, and its sockets, to the parent.

    gunicorn with ``--preload`` forks after ``create_app()``, which may have used the database, and a
    view may fork, too: two processes on one socket would read each other's results. The server is told
    nothing, as the parent still uses it. redis-py handles its own sockets.
    """
    raw_connection.let_go()
    transaction.leave_to_parent()
    own_pool.let_go()  # first: the end of the application's would close what is in them
    for state in states():
        for engine in state.engines.values():
            engine.dispose(close=False)


os.register_at_fork(after_in_child=_leave_to_parent)
