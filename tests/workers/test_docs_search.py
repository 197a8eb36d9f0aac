"""The worked example of docs/search.md, run as it is written."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from tests.workers.conftest import Host
from tuning_db.trials import Measured
from workers.search import forked_steps
from workers.search.templates.knobs import config_of

REPOSITORY = Path(__file__).parents[2]


def written_to(folder: Path) -> dict[str, Path]:
    """The page's programs as files: each begins with a comment that is its name."""
    blocks = re.findall(r"(?ms)^```python\n(# (\w+\.py)\n.*?)^```", (REPOSITORY / "docs/search.md").read_text())
    for text, name in blocks:
        (folder / name).write_text(text)
    return {name: folder / name for _, name in blocks}


@pytest.mark.timeout(300)
def test_the_example(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's choices are measured on this machine, all that are asked for run, the fastest is chosen, and its
    code sums rows."""
    files = written_to(tmp_path)
    assert list(files) == ["row_sum.py", "search_row_sum.py"]
    monkeypatch.syspath_prepend(str(tmp_path))
    # The fork server is a process of its own, which imports the template.
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    try:
        found: dict[str, Any] = runpy.run_path(str(files["search_row_sum.py"]))
    finally:
        sys.modules.pop("row_sum", None)

    assert (found["result"].trials, found["result"].failures, found["result"].reason) == (8, 0, "trials")
    assert not [data for kind, data in found["events"] if kind == "warning"]
    choice, template, workload = found["choice"], found["RowSum"](), found["workload"]
    assert isinstance(choice.trial.outcome, Measured)
    geometry = {"rows": found["ROWS"], "length": found["LENGTH"]}
    assert workload.geometry == geometry
    assert choice.config == config_of(template, choice.trace)
    assert choice.config in template.configs(geometry, found["cpu"])

    compiled = tvm.compile(forked_steps.schedule_of(workload, choice.trace).mod, target=host.target)
    data = np.random.default_rng(1).standard_normal((found["ROWS"], found["LENGTH"])).astype("float32")
    sums = tvm.runtime.tensor(np.full(found["ROWS"], np.nan, dtype="float32"))
    compiled["main"](tvm.runtime.tensor(data), sums)
    np.testing.assert_allclose(sums.numpy(), data.sum(axis=1, dtype="float64"), atol=1e-3)
