"""How each slot of a device was when it was last measured on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "healths",
        sa.Column("device", sa.String(128), primary_key=True),
        sa.Column("slot", sa.String(255), primary_key=True),
        sa.Column("reference_s", sa.Double(), nullable=False),
        sa.Column("best_reference_s", sa.Double(), nullable=False),
        sa.Column("temperature_c", sa.Double(), nullable=True),
        sa.Column("khz", sa.Integer(), nullable=True),
        sa.Column("governor", sa.String(255), nullable=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
    )
