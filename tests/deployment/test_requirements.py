"""The pinned requirements are those that pyproject.toml asks for. Needs no network; `make requirements` mends it."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deployment.dockerfiles import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = {"api": ["server", "postgres"], "worker": ["worker", "postgres"], "dev": ["dev"]}


def wanted(extras: list[str]) -> list[Requirement]:
    """What the project with these extras asks for, extras of its own followed."""
    project = PROJECT["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                found += wanted(sorted(requirement.extras))
            else:
                found.append(requirement)
    return found


def pins(name: str) -> dict[str, str]:
    """Package → version, as requirements/`name`.txt has them. Every line is understood, or it is an error."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: ; [^-]+)?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
        assert match, f"requirements/{name}.txt: {line!r} is not one version with its hashes"
        found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_direct_dependency_is_pinned_within_its_range(name: str) -> None:
    """requirements/NAME.txt holds each direct dependency, at a version that pyproject.toml allows."""
    pinned = pins(name)
    for requirement in wanted(FILES[name]):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/{name}.txt; run: make requirements"
        assert requirement.specifier.contains(version), f"{requirement.name} {version} is not {requirement.specifier}"


def test_the_build_is_pinned_within_the_range_of_the_build_system() -> None:
    """requirements/build.txt holds what pyproject.toml builds with."""
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert requirement.specifier.contains(pins("build")[requirement.name])


def test_one_version_of_a_package_in_all_environments() -> None:
    """What tests passed with is what the images run: no file pins another version than the tests' own."""
    tested = pins("dev")
    for name in ("api", "worker"):
        assert pins(name).items() <= tested.items()
    assert {p: v for p, v in pins("build").items() if p in tested}.items() <= tested.items()


def test_the_api_and_the_client_need_no_compiler_of_models() -> None:
    """The API's environment holds neither TVM nor ONNX Runtime nor XGBoost."""
    assert not {"apache-tvm", "apache-tvm-ffi", "onnxruntime", "xgboost", "xgboost-cpu"} & pins("api").keys()
