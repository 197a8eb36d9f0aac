"""The first schema: models, devices, jobs and their events, tuning records, cost models, artifacts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DIGEST = sa.String(64)
MOMENT = sa.DateTime(timezone=True)
ACTIVE = sa.text("state IN ('QUEUED', 'RUNNING')")
HAS_CONFIG = sa.text("config IS NOT NULL")


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("digest", DIGEST, primary_key=True),
        sa.Column("blob", DIGEST, nullable=False, index=True),
        sa.Column("format", sa.String(32), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("inputs", sa.JSON(), nullable=False),
        sa.Column("outputs", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "devices",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("worker", sa.String(255), primary_key=True),
        sa.Column("identity", sa.JSON(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("toolchain", sa.JSON(), nullable=False),
        sa.Column("last_seen", MOMENT, nullable=False),
    )
    op.create_table(
        "roofs",
        sa.Column("device", sa.String(128), primary_key=True),
        sa.Column("flops_per_s", sa.Double(), nullable=False),
        sa.Column("bytes_per_s", sa.Double(), nullable=False),
        sa.Column("flops_per_s_one_thread", sa.Double(), nullable=False),
        sa.Column("measured_at", MOMENT, nullable=False),
        sa.Column("toolchain", sa.JSON()),
    )
    op.create_table(
        "jobs",
        sa.Column("number", SERIAL, primary_key=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("key_digest", DIGEST, nullable=False),
        sa.Column("budget_digest", DIGEST, nullable=False),
        sa.Column("device", sa.String(128), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lost", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("claimed_by", sa.String(255)),
        sa.Column("heartbeat_at", MOMENT),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("trials_measured", sa.Integer(), nullable=False),
        sa.Column("error_kind", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("woken_at", MOMENT),
    )
    op.create_index(
        "uq_jobs_active_key_budget",
        "jobs",
        ["key_digest", "budget_digest"],
        unique=True,
        sqlite_where=ACTIVE,
        postgresql_where=ACTIVE,
    )
    op.create_index("ix_jobs_key_state", "jobs", ["key_digest", "state"])
    op.create_index("ix_jobs_state_device", "jobs", ["state", "device"])
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_sha256", DIGEST, nullable=False),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "record_scopes",
        sa.Column("digest", DIGEST, primary_key=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "workloads",
        sa.Column("number", SERIAL, primary_key=True),
        sa.Column("scope", DIGEST, sa.ForeignKey("record_scopes.digest"), nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("structural_hash", sa.String(255), nullable=False),
        sa.Column("template", sa.String(255)),
        sa.Column("geometry", sa.JSON()),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("module", sa.Text(), nullable=False),
    )
    op.create_index("uq_workloads_scope_digest", "workloads", ["scope", "digest"], unique=True)
    op.create_index("ix_workloads_scope_structural_hash", "workloads", ["scope", "structural_hash"])
    op.create_index("ix_workloads_scope_template", "workloads", ["scope", "template"])
    op.create_table(
        "trials",
        sa.Column(
            "workload", sa.BigInteger(), sa.ForeignKey("workloads.number"), primary_key=True, autoincrement=False
        ),
        sa.Column("trace_digest", DIGEST, primary_key=True),
        sa.Column("run_s", sa.JSON()),
        sa.Column("kind", sa.String(32)),
        sa.Column("config", sa.JSON()),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("trace", sa.Text(), nullable=False),
    )
    op.create_index(
        "ix_trials_experience",
        "trials",
        ["workload"],
        sqlite_where=HAS_CONFIG,
        postgresql_where=HAS_CONFIG,
    )
    op.create_table(
        "cost_models",
        sa.Column("scope", DIGEST, sa.ForeignKey("record_scopes.digest"), primary_key=True),
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("format_version", sa.Integer(), nullable=False),
        sa.Column("trained_on", sa.Integer(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("booster_sha256", DIGEST, nullable=False),
        sa.Column("booster", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "artifacts",
        sa.Column("key_digest", DIGEST, primary_key=True),
        sa.Column("model", DIGEST, nullable=False, index=True),
        sa.Column("device", sa.String(128), nullable=False, index=True),
        sa.Column("key", sa.JSON(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("library", DIGEST, nullable=False, index=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=False),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
