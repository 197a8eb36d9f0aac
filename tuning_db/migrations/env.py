"""What Alembic runs for every command. The caller has opened the transaction, and holds the lock: all or nothing."""

from __future__ import annotations

from alembic import context

from tuning_db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite cannot alter most of a table in place.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
