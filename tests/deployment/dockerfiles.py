"""Reads a Dockerfile, and carries out its builder stage below a folder of this machine: no container engine is needed.

Only what our Dockerfiles use is understood; anything else is an error, so that nothing is passed over in silence.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, its continuations joined: ``RUN``, and all that follows it."""

    name: str
    rest: str

    @property
    def exec_form(self) -> list[str]:
        """The command of ``CMD ["program", "argument"]``."""
        command: list[str] = json.loads(self.rest)
        return command


@dataclass(frozen=True)
class Stage:
    base: str
    name: str
    instructions: tuple[Instruction, ...]

    def only(self, name: str) -> Instruction:
        """The stage's single instruction of that name."""
        (found,) = (i for i in self.instructions if i.name == name)
        return found


def read(path: Path) -> tuple[Stage, ...]:
    """The stages of a Dockerfile."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text()).replace("\\\n", " ")
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            stages.append(Stage(base, stage, ()))
        else:
            last = stages.pop()
            stages.append(Stage(last.base, last.name, (*last.instructions, Instruction(name, " ".join(rest.split())))))
    return tuple(stages)


def build(stage: Stage, root: Path) -> None:
    """Carry out `stage` with `root` in place of the image's root. ENV is left out: pip may use this machine's cache."""
    workdir = root
    for instruction in stage.instructions:
        match instruction.name:
            case "ENV":
                pass
            case "WORKDIR":
                workdir = below(root, instruction.rest)
                workdir.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = instruction.rest.split()
                for source in sources:
                    assert is_in_context(source), f".dockerignore leaves {source} out of the build's context"
                    _copy(ROOT / source, workdir / target, into=len(sources) > 1 or target.endswith("/"))
            case "RUN":
                done = subprocess.run(
                    ["sh", "-euc", re.sub(r"(?<![\w./=-])/(?=\w)", f"{root}/", instruction.rest)],
                    cwd=workdir,
                    # Byte code is half of an installation's time, and most of it is for modules that no test imports.
                    env={**environment(Path(sys.executable).parent), "PIP_NO_COMPILE": "1"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"RUN {instruction.rest}\n{done.stderr[-3000:]}"
            case other:
                raise NotImplementedError(f"{other} {instruction.rest}")


def environment(programs: Path) -> dict[str, str]:
    """This process's environment with `programs` first in PATH, and without what would show other packages to it."""
    kept = {
        n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME") and not n.startswith("TUNERY_")
    }
    return {**kept, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def below(root: Path, path: str) -> Path:
    """Where the image's absolute `path` lies."""
    return root / path.lstrip("/")


def is_in_context(source: str) -> bool:
    """Whether .dockerignore lets `source` through. Ours leaves out everything, then names what is wanted."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    return any(fnmatch(source, line[1:]) for line in lines if line.startswith("!"))


def _copy(source: Path, target: Path, *, into: bool) -> None:
    if source.is_dir():
        # As Docker does: the folder's content, not the folder.
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target = target / source.name if into else target
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
