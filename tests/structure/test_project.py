"""The project's settings say what the design asks for, and say it once or equally."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def requirement(name: str, group: list[str]) -> str:
    (found,) = [line for line in group if re.split(r"[<>=! ]", line)[0] == name]
    return found


def test_transformers_is_new_enough():
    """Before 5.10.1 transformers takes the folder kernels/ for the Hugging Face package."""
    line = requirement("transformers", PROJECT["project"]["dependencies"])
    assert line == "transformers>=5.10.1,<6"


def test_extras_are_the_promised_ones():
    """vllm, studies, harnesses, notebook, docs and dev."""
    assert set(PROJECT["project"]["optional-dependencies"]) == {
        "vllm",
        "studies",
        "harnesses",
        "notebook",
        "docs",
        "dev",
    }


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_tools_have_one_version(tool):
    """pre-commit and the dev extra pin the same ruff and mypy, so that they agree on a file."""
    version = requirement(tool, PROJECT["project"]["optional-dependencies"]["dev"]).partition("==")[
        2
    ]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    pinned = {"ruff": f"rev: v{version}\n", "mypy": f"name: mypy {version}\n"}[tool]
    assert version
    assert pinned in hooks


def test_wheel_takes_the_three_packages():
    """The build's package list, mypy's files and the folders agree."""
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == PROJECT["tool"]["mypy"]["files"]
    assert all((ROOT / package / "__init__.py").is_file() for package in packages)


def test_mypy_is_strict_and_finds_packages_by_their_init_files():
    """explicit_package_bases would make the folders themselves packages."""
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert "explicit_package_bases" not in PROJECT["tool"]["mypy"]


def test_warnings_are_errors():
    """The first filter turns every warning into an error; the rest are narrow exceptions."""
    filters = PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert filters[0] == "error"
    assert all(line.startswith("ignore:") and line.count(":") >= 2 for line in filters[1:])


@pytest.mark.parametrize("script", [".ci/run", "examples/demo.sh", "examples/test.sh"])
def test_scripts_stop_at_the_first_failure(script):
    """A script that goes on after a failed step can report success."""
    assert "\nset -euo pipefail\n" in (ROOT / script).read_text("utf-8")
