"""The wheel holds the three packages, all of them and nothing else.

CI hands over the wheel that it built in FLIPTRACE_WHEEL; otherwise one is built here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = [
    ROOT / "tracer/fliptrace",
    ROOT / "interventions/fliptrace_interventions",
    ROOT / "kernels/fliptrace_kernels",
]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """The names of all files in the wheel."""
    given = os.environ.get("FLIPTRACE_WHEEL")
    if given:
        path = Path(given)
    else:
        folder = tmp_path_factory.mktemp("wheel")
        build = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            folder,
            ROOT,
        ]
        completed = subprocess.run(build, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_top_level_is_the_three_packages(wheel_names):
    """A fourth name, or one of the folders' names, could shadow another project's package."""
    names = {name.partition("/")[0] for name in wheel_names}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        folder.name for folder in PACKAGE_FOLDERS
    }
    assert len([name for name in names if name.endswith(".dist-info")]) == 1


def test_every_file_of_the_packages_ships(wheel_names):
    """Modules, type markers, model files, templates, styles, scripts and schemas are all in."""
    expected = {
        path.relative_to(folder.parent).as_posix()
        for folder in PACKAGE_FOLDERS
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel_names if ".dist-info/" not in name} == expected


def test_licence_ships(wheel_names):
    """The licence text travels with the code."""
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


@pytest.mark.skipif("FLIPTRACE_WHEEL" not in os.environ, reason="tests the working tree")
@pytest.mark.parametrize("folder", PACKAGE_FOLDERS, ids=lambda folder: folder.name)
def test_the_wheel_is_what_is_tested(folder):
    """With a wheel given, the packages come from the environment and not from the source roots."""
    spec = importlib.util.find_spec(folder.name)
    assert not Path(spec.origin).is_relative_to(folder)


def test_commands_of_the_installed_distribution_load():
    """Each script that the distribution installs points at a function that exists."""
    scripts = importlib.metadata.distribution("fliptrace").entry_points.select(
        group="console_scripts"
    )
    assert {script.name for script in scripts} == {
        "trace-pair",
        "trace-diff",
        "trace-intervene",
        "trace-study",
        "trace-check",
    }
    assert all(callable(script.load()) for script in scripts)


def test_studies_of_the_installed_distribution_load():
    """trace-study finds by its entry point what the tracer may not import."""
    studies = importlib.metadata.distribution("fliptrace").entry_points.select(
        group="fliptrace.studies"
    )
    assert {study.name for study in studies} == {"fragility"}
    assert all(callable(study.load()) for study in studies)
