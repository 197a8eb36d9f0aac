"""What Alembic runs for every command: the caller has opened the connection and holds the lock."""

from __future__ import annotations

from alembic import context

from tuning_db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # Also on SQLite, where our engine opens the transaction itself: a migration is done wholly or not at all.
    transactional_ddl=True,
    # SQLite cannot alter most of a table in place.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
