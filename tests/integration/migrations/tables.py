"""The tables of other releases than this one."""

from __future__ import annotations

from typing import Any

EARLIER = """
DROP TABLE idempotency_record, idempotency_record_step;
CREATE TABLE idempotency_record (
    key BYTEA NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    completed_at TIMESTAMP WITH TIME ZONE,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    attempt INTEGER NOT NULL,
    fingerprint_version SMALLINT NOT NULL,
    status SMALLINT,
    state VARCHAR(16) NOT NULL,
    owner VARCHAR(22) NOT NULL,
    name VARCHAR(255) NOT NULL,
    fingerprint BYTEA NOT NULL,
    headers JSON,
    body BYTEA,
    request BYTEA,
    tries INTEGER,
    tried_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (key)
);
ALTER TABLE idempotency_record SET (fillfactor = 92);
CREATE INDEX ix_idempotency_record_expires_at ON idempotency_record (expires_at);
CREATE INDEX ix_idempotency_record_resumable ON idempotency_record (created_at)
 WHERE request IS NOT NULL;
CREATE TABLE idempotency_record_step (
    key BYTEA NOT NULL,
    name VARCHAR(255) NOT NULL,
    attempt INTEGER NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    result BYTEA NOT NULL,
    PRIMARY KEY (key, name)
);
COMMENT ON TABLE idempotency_record IS 'Idempotency keys and their responses (Flask-Idempotency)';
COMMENT ON COLUMN idempotency_record.key IS 'hash of scope and key';
COMMENT ON COLUMN idempotency_record.lease_expires_at IS 'null: none, or released';
COMMENT ON COLUMN idempotency_record.attempt IS 'fencing token: 1, 2, ...';
COMMENT ON COLUMN idempotency_record.owner IS 'random, of the present attempt';
COMMENT ON COLUMN idempotency_record.name IS 'the operation''s, e.g. the endpoint';
COMMENT ON COLUMN idempotency_record.headers
     IS 'list of pairs, or a word for usual ones; null when sealed';
COMMENT ON COLUMN idempotency_record.body IS 'null when it was too large to store';
COMMENT ON COLUMN idempotency_record.request IS 'of resumable operations, until they end';
COMMENT ON COLUMN idempotency_record.tries IS 'attempts and tries since a release; null: as attempt';
COMMENT ON COLUMN idempotency_record.tried_at IS 'by resume';
COMMENT ON TABLE idempotency_record_step
     IS 'Finished steps of idempotent operations (Flask-Idempotency)';
COMMENT ON COLUMN idempotency_record_step.key IS 'the record''s';
COMMENT ON COLUMN idempotency_record_step.attempt IS 'that finished it';
COMMENT ON COLUMN idempotency_record_step.result IS 'JSON; sealed like responses';
"""
"""The tables as they were before operators' deeds were recorded in them. Never edit: a later release
adds its predecessor's."""

LATER = """
ALTER TABLE idempotency_record ADD later JSON;
CREATE INDEX ix_idempotency_record_later ON idempotency_record (created_at) WHERE later IS NOT NULL;
ALTER TABLE idempotency_record_step ADD later TEXT;
"""
"""What a release after this one may do to the tables: add what may be null, and partial indexes."""


def make_earlier(world: Any) -> None:
    """Put the tables of the release before in the place of the present ones."""
    world.sql(EARLIER)


def make_later(world: Any) -> None:
    """Do what the release after this one will."""
    world.sql(LATER)
