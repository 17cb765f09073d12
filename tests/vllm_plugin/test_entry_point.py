"""What vLLM loads in every process, wanted or not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

import fliptrace_kernels.vllm_plugin as entry
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.settings import Settings, read
from fliptrace_kernels.vllm_plugin.workers import RAY_VARIABLE, carry_to_ray


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**{k: v for k, v in entry.os.environ.items() if "FLIPTRACE" not in k}, **environment},
    )


@pytest.mark.parametrize("environment", [{}, {"FLIPTRACE_SHRINK": ""}, {"FLIPTRACE_SHRINK": " "}])
def test_unset_means_that_nothing_happens(environment):
    """Importing and registering load neither torch nor vLLM nor another module of the plugin."""
    code = (
        "import sys; import fliptrace_kernels.vllm_plugin as plugin; plugin.register();"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in "
        "('fliptrace_kernels', 'torch', 'triton', 'vllm', 'numpy')))"
    )
    finished = run(code, **environment)
    assert finished.stdout == "['fliptrace_kernels', 'fliptrace_kernels.vllm_plugin']\n", finished


def test_the_distribution_announces_the_plugin():
    """vLLM finds `register` under the name that VLLM_PLUGINS would list."""
    (found,) = importlib.metadata.distribution("fliptrace").entry_points.select(
        group="vllm.general_plugins"
    )
    assert found.name == "fliptrace"
    assert found.load() is entry.register


def test_a_reduction_that_does_not_exist_is_an_error_before_anything_is_imported(monkeypatch):
    """The message names the variable, the value and examples."""
    monkeypatch.setenv("FLIPTRACE_SHRINK", "sorted:8")
    with pytest.raises(PluginError, match=r"FLIPTRACE_SHRINK must name .*sorted:8.* Try: atomic:8"):
        entry.register()


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="says what happens without vLLM"
)
def test_without_vllm_the_plugin_says_what_it_needs(monkeypatch):
    """Whoever calls `register` without vLLM gets no bare ImportError."""
    monkeypatch.setenv("FLIPTRACE_SHRINK", "unsplit")
    with pytest.raises(PluginError, match=r"needs vLLM .*No module named 'vllm'"):
        entry.register()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"FLIPTRACE_COUNT_LAUNCHES": "1"}, None),
        ({"FLIPTRACE_SHRINK": "deterministic:8"}, ("deterministic:8/32", False)),
        ({"FLIPTRACE_SHRINK": " det_sk8 "}, ("deterministic:8/32", False)),
        ({"FLIPTRACE_SHRINK": "local", "FLIPTRACE_COUNT_LAUNCHES": "1"}, ("local:32/32", True)),
        ({"FLIPTRACE_SHRINK": "tree:8", "FLIPTRACE_COUNT_LAUNCHES": "0"}, ("tree:8/32", False)),
        ({"FLIPTRACE_SHRINK": "atomic:vllm"}, ("atomic:vllm", False)),
    ],
)
def test_settings(environment, expected):
    """The environment is read once, into a reduction's long name and one switch."""
    found = read(environment)
    assert (found and (str(found.reduction), found.count_launches)) == expected
    assert found is None or isinstance(found, Settings)


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    """FLIPTRACE_COUNT_LAUNCHES=yes would otherwise count nothing, silently."""
    with pytest.raises(PluginError, match=r"FLIPTRACE_COUNT_LAUNCHES must be 0 or 1; got 'yes'"):
        read({"FLIPTRACE_SHRINK": "unsplit", "FLIPTRACE_COUNT_LAUNCHES": "yes"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"FLIPTRACE_SHRINK": "local"}, "FLIPTRACE_SHRINK"),
        (
            {
                "FLIPTRACE_SHRINK": "local",
                "FLIPTRACE_COUNT_LAUNCHES": "1",
                RAY_VARIABLE: "MINE, HIS",
            },
            "MINE,HIS,FLIPTRACE_SHRINK,FLIPTRACE_COUNT_LAUNCHES",
        ),
    ],
)
def test_workers_that_ray_starts_get_the_variables(before, after):
    """What the user has vLLM copy stays; doing it again adds nothing."""
    environment = dict(before)
    for _ in range(2):
        carry_to_ray(environment)
        assert environment == {**before, RAY_VARIABLE: after}
