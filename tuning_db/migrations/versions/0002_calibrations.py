"""Calibration data: samples of a model's inputs that jobs quantize by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DIGEST = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "calibrations",
        sa.Column("digest", DIGEST, primary_key=True),
        sa.Column("blob", DIGEST, nullable=False, index=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("arrays", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
