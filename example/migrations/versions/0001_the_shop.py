"""The shop."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0001'
down_revision = None


def upgrade() -> None:
    op.create_table('account',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('password_hash', sa.String(), nullable=False),
    sa.Column('token_digest', sa.LargeBinary(), nullable=False),
    sa.Column('balance', sa.BigInteger(), nullable=False),
    sa.CheckConstraint('balance >= 0', name='balance'),
    sa.PrimaryKeyConstraint('id'),
    sa.UniqueConstraint('name'),
    sa.UniqueConstraint('token_digest')
    )
    op.create_table('idempotency_record',
    sa.Column('key', sa.LargeBinary(length=23), nullable=False, comment='hash of scope and key'),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('completed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('lease_expires_at', sa.DateTime(timezone=True), nullable=True, comment='null: none, or released'),
    sa.Column('attempt', sa.Integer(), nullable=False, comment='fencing token: 1, 2, ...'),
    sa.Column('fingerprint_version', sa.SmallInteger(), nullable=False),
    sa.Column('status', sa.SmallInteger(), nullable=True),
    sa.Column('state', sa.String(length=16), nullable=False),
    sa.Column('owner', sa.String(length=22), nullable=False, comment='random, of the present attempt'),
    sa.Column('name', sa.String(length=255), nullable=False, comment="the operation's, e.g. the endpoint"),
    sa.Column('fingerprint', sa.LargeBinary(), nullable=False),
    sa.Column('headers', sa.JSON(), nullable=True, comment='list of pairs, or a word for usual ones; null when sealed'),
    sa.Column('body', sa.LargeBinary(), nullable=True, comment='null when it was too large to store'),
    sa.Column('released_attempt', sa.Integer(), nullable=True, comment='after which an operator released it'),
    sa.Column('steps', sa.JSON(), nullable=True, comment='finished ones by name: result (sealed like responses), attempt, time'),
    sa.Column('audit', sa.JSON(), nullable=True, comment='what operators did to it, when and why; no request reads this'),
    sa.PrimaryKeyConstraint('key'),
    comment='Idempotency keys and their responses (Flask-Idempotency)',
    info={'flask_idempotency': True},
    postgresql_using='heap WITH (fillfactor = 92)'
    )
    op.create_index(op.f('ix_idempotency_record_expires_at'), 'idempotency_record', ['expires_at'], unique=False)
    op.create_index('ix_idempotency_record_leased', 'idempotency_record', ['lease_expires_at'], unique=False, postgresql_where=sa.text('lease_expires_at IS NOT NULL'))
    op.create_table('product',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('description', sa.String(), nullable=False),
    sa.Column('price', sa.BigInteger(), nullable=False),
    sa.Column('stock', sa.Integer(), nullable=False),
    sa.CheckConstraint('stock >= 0', name='stock'),
    sa.PrimaryKeyConstraint('id'),
    sa.UniqueConstraint('name')
    )
    op.create_table('order',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('account_id', sa.Integer(), nullable=False),
    sa.Column('product_id', sa.Integer(), nullable=False),
    sa.Column('quantity', sa.Integer(), nullable=False),
    sa.Column('amount', sa.BigInteger(), nullable=False),
    sa.Column('status', sa.String(), nullable=False),
    sa.Column('charge_id', sa.String(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.ForeignKeyConstraint(['account_id'], ['account.id'], ),
    sa.ForeignKeyConstraint(['product_id'], ['product.id'], ),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index(op.f('ix_order_account_id'), 'order', ['account_id'], unique=False)
    op.create_table('payment',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('account_id', sa.Integer(), nullable=False),
    sa.Column('amount', sa.BigInteger(), nullable=False),
    sa.Column('description', sa.String(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.ForeignKeyConstraint(['account_id'], ['account.id'], ),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_index(op.f('ix_payment_account_id'), 'payment', ['account_id'], unique=False)
