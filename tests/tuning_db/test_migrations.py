"""The schema: made by Alembic alone, by one process of many, and refused when it is another version's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.samples import make_spec, sha256
from tuning_db.engine import open_engine, parse_url
from tuning_db.errors import SchemaMismatch
from tuning_db.migrations import check_schema, drift, upgrade
from tuning_db.models import Base
from tuning_db.store import TuningStore


def set_revision(url: str, revision: str) -> None:
    engine = open_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()


def test_upgrade_then_use(empty_database_url: str) -> None:
    """A new database is upgraded and then used; upgrading again changes nothing that is in it."""
    upgrade(empty_database_url)
    store = TuningStore(empty_database_url)
    job = store.submit(make_spec()).job
    upgrade(empty_database_url)
    assert store.job(job.id) == job
    store.close()


def test_upgrade_of_a_database_in_use(empty_database_url: str) -> None:
    """A library that was published with the first schema is still found by its key after the upgrade."""
    upgrade(empty_database_url)
    store = TuningStore(empty_database_url)
    claimed = store.claim(store.submit(make_spec()).job.id, "w1")
    assert claimed is not None
    published = store.publish(claimed[0], (sha256("a library"), 5), 0.01, {})
    store.close()
    engine = open_engine(parse_url(empty_database_url))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE calibrations"))
        connection.execute(sa.text("DROP TABLE healths"))
    engine.dispose()
    set_revision(empty_database_url, "0001")
    with pytest.raises(SchemaMismatch, match="schema is 0001"):
        TuningStore(empty_database_url)
    upgrade(empty_database_url)
    store = TuningStore(empty_database_url)
    assert store.find_artifact(make_spec().key) == published
    assert drift(empty_database_url) == []
    store.close()


def test_several_processes_at_once(empty_database_url: str) -> None:
    """Four processes that upgrade an empty database at the same moment all succeed, and one schema comes of it."""
    script = """
import sys
from tuning_db.migrations import upgrade
print("ready", flush=True)
sys.stdin.readline()
upgrade(sys.argv[1])
"""
    command = [sys.executable, "-c", script, empty_database_url]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(4)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in started]
    assert ended == [("", 0)] * 4
    check_schema(empty_database_url)


def test_rows_and_migrations_agree(database_url: str) -> None:
    """What models.py describes is what the migrations make, column by column and index by index."""
    assert drift(database_url) == []


def test_drift_is_seen(database_url: str) -> None:
    """The comparison does see a column, a type and an index that differ."""
    engine = open_engine(parse_url(database_url))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP INDEX ix_jobs_state_device"))
        connection.execute(sa.text("ALTER TABLE artifacts DROP COLUMN size_bytes"))
        connection.execute(sa.text("ALTER TABLE artifacts ADD COLUMN size_bytes TEXT"))
        connection.execute(sa.text("ALTER TABLE models ADD COLUMN author TEXT"))
    engine.dispose()
    found = str(drift(database_url))
    for name in ("ix_jobs_state_device", "size_bytes", "author"):
        assert name in found


def test_at_most_one_active_job(database_url: str) -> None:
    """The database itself refuses a second job under way for a key and budget; Alembic does not compare that."""
    store = TuningStore(database_url)
    store.submit(make_spec())
    store.close()
    engine = open_engine(parse_url(database_url))
    columns = ", ".join(c.name for c in Base.metadata.tables["jobs"].columns if c.name not in ("number", "id"))
    copy = f"INSERT INTO jobs (id, {columns}) SELECT 'second', {columns} FROM jobs"
    with pytest.raises(sa.exc.IntegrityError), engine.begin() as connection:
        connection.execute(sa.text(copy))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE jobs SET state = 'FAILED'"))
        connection.execute(sa.text(copy))
    engine.dispose()


def test_check_command() -> None:
    """`python -m tuning_db.migrations check` ends with 0 while rows and migrations agree."""
    done = subprocess.run([sys.executable, "-m", "tuning_db.migrations", "check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_schema(empty_database_url: str) -> None:
    """A store over a database without a schema says which command to run, and makes nothing."""
    with pytest.raises(SchemaMismatch, match="run: tunery db upgrade"):
        TuningStore(empty_database_url)
    path = parse_url(empty_database_url)
    if path.get_backend_name() == "sqlite":
        assert not Path(str(path.database)).exists()


def test_newer_schema(database_url: str) -> None:
    """A database that a later version upgraded is refused by an older one, and not touched (pytorch#150494)."""
    store = TuningStore(database_url)
    set_revision(database_url, "9999")
    for refused in (store.ping, lambda: TuningStore(database_url), lambda: upgrade(database_url)):
        with pytest.raises(SchemaMismatch, match="this Tunery is older than the database"):
            refused()
    store.close()


def test_failed_upgrade_leaves_nothing(empty_database_url: str) -> None:
    """An upgrade that fails half-way leaves the database as it was, and succeeds once the cause is gone."""
    upgrade(empty_database_url)  # only to have the file and its journal mode
    engine = open_engine(parse_url(empty_database_url))
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sa.text(f"DROP TABLE {table.name}"))
        connection.execute(sa.text("DELETE FROM alembic_version"))
        connection.execute(sa.text("CREATE TABLE trials (in_the_way INTEGER)"))
    with pytest.raises(sa.exc.DBAPIError, match="already exists"):
        upgrade(empty_database_url)
    assert sa.inspect(engine).get_table_names() == ["alembic_version", "trials"]
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE trials"))
    engine.dispose()
    upgrade(empty_database_url)
    check_schema(empty_database_url)


def test_odd_path(tmp_path: Path) -> None:
    """A database may lie in a folder that does not exist yet, with blanks, percent signs and accents in its name."""
    path = tmp_path / "a folder" / "100% é" / "tunery.db"
    url = f"sqlite:///{path}"
    upgrade(url)
    store = TuningStore(url)
    store.ping()
    store.close()
    assert path.stat().st_size > 0


def test_any_working_folder(tmp_path: Path) -> None:
    """The migrations are found in the package, wherever the process was started and however it was installed."""
    script = "import sys; from tuning_db.migrations import upgrade; upgrade('sqlite:///here.db')"
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": root})
    assert (tmp_path / "here.db").exists()
