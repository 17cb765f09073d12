"""What goes wrong while an execution is recorded: each a clear error, and a trace to the last acknowledged step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import fliptrace as ft
from fliptrace.capture.vllm_engine.hosting import check_plugin
from fliptrace.errors import InputError, RecordingError
from fliptrace.store import TraceReader, open_trace
from fliptrace_kernels import parse_reduction
from fliptrace_kernels.vllm_plugin.installation import Installation, _installed
from fliptrace_kernels.vllm_plugin.settings import Settings
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

FAILING_STEP = 5

#: A command in whose real engine something happens before the sixth recorded step.
COMMAND = """
import os, signal, sys
from fliptrace.capture.vllm_engine.engine import VllmEngine
from fliptrace.command_line.trace_pair import main

own = VllmEngine.step

def step(engine, token_id=None):
    if engine.step_number == 5 and engine.runtime.observer is not None:
        WHAT
    return own(engine, token_id)

VllmEngine.step = step
sys.exit(main())
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
ABORTED = "engine.loaded.llm.llm_engine.abort_request([engine._request._id], internal=True)"


def run_command(bundled, out, what="pass", **environment):
    """Run trace-pair with the bundled model on vLLM in a process of its own."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            COMMAND.replace("WHAT", what),
            *("--engine", "vllm", "--model", str(bundled.model), "--adapter", str(bundled.adapter)),
            *("--prompt", bundled.prompts[0].text, "--reduction", "unsplit", "--attempts", "1"),
            *("--max-new-tokens", "12", "--no-observer-control", "--quiet", "--out", str(out)),
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def steps_of(path):
    """How many steps a trace holds; each is read, and checked against its seal."""
    with TraceReader(path) as trace:
        for record in trace.steps:
            assert trace.step_frames(record.step)
        return len(trace.steps)


def failing(engine, error):
    """Make the model's third layer fail in one decode step."""
    layer = engine.host.runner.model.model.layers[3]

    def fail(_module, _arguments):
        if engine.runtime.rows and engine.runtime.step == FAILING_STEP:
            raise error

    return layer.register_forward_pre_hook(fail)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("CUDA error: device-side assert triggered"),
            "vLLM's worker failed in step 5",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
    ],
)
def test_a_worker_that_fails_ends_the_trace_before_the_step(
    engine, prompt, generate, tmp_path, error, said
):
    """The step is named, the five before it can be read, and the engine goes on with the next prompt."""
    tokens, _ = generate(engine, prompt.ids, 3)
    handle = failing(engine, error)
    try:
        with pytest.raises(RecordingError, match=said) as raised:
            ft.trace_pair(
                engine,
                prompt=prompt,
                reduction="unsplit",
                attempts=1,
                max_new_tokens=12,
                observer_control=False,
                directory=tmp_path / "pair",
            )
    finally:
        handle.remove()
    assert str(error) in str(raised.value)
    assert raised.value.__cause__ is error
    assert steps_of(tmp_path / "pair" / "reference.trace") == FAILING_STEP
    with open_trace(tmp_path / "pair" / "reference.trace") as trace:
        assert not trace.closing.complete
    assert generate(engine, prompt.ids, 3)[0] == tokens


def test_an_aborted_request_leaves_its_trace(bundled, tmp_path):
    """Exit code 2, one line that says what happened and where the trace is, which holds the steps before."""
    finished = run_command(bundled, tmp_path / "pair", ABORTED)
    assert finished.returncode == 2, finished.stderr
    line = finished.stderr.strip().splitlines()[-1]
    assert line.startswith("trace-pair: the request was aborted before step 5")
    where = re.search(r"What was recorded is in (\S+)", line).group(1)
    assert steps_of(f"{where}/reference.trace") == FAILING_STEP


def test_a_killed_worker_leaves_its_trace(bundled, tmp_path):
    """The process is gone at once; at most the two steps that were not acknowledged are lost."""
    finished = run_command(bundled, tmp_path / "pair", KILLED)
    assert finished.returncode == -signal.SIGKILL
    steps = steps_of(tmp_path / ".pair.partial" / "reference.trace")
    assert FAILING_STEP - 2 <= steps <= FAILING_STEP


def test_a_plugin_that_vllm_was_told_not_to_load(bundled, tmp_path):
    """FLIPTRACE_SHRINK with a VLLM_PLUGINS that leaves fliptrace out: exit code 2 and the reason; nothing written."""
    finished = run_command(
        bundled, tmp_path / "pair", FLIPTRACE_SHRINK="unsplit", VLLM_PLUGINS="other"
    )
    assert finished.returncode == 2
    line = finished.stderr.strip().splitlines()[-1]
    assert "FLIPTRACE_SHRINK=unsplit asks for the fliptrace plugin" in line
    assert "VLLM_PLUGINS=other keeps it from loading" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("here", "said"), [("unsplit", "is unsplit"), ("", "is unset")])
def test_another_reduction_in_the_worker_is_refused(monkeypatch, here, said):
    """What the worker read when it started is compared with what is set now."""
    settings = Settings(parse_reduction("deterministic:8"))
    monkeypatch.setitem(_installed, Operator(), Installation(Operator(), settings, None, None))
    monkeypatch.setenv("FLIPTRACE_SHRINK", here)
    with pytest.raises(InputError, match=said) as error:
        check_plugin()
    assert "deterministic:8" in str(error.value)
    monkeypatch.setenv("FLIPTRACE_SHRINK", "deterministic:8")
    assert "is replaced by deterministic:8" in check_plugin()


def test_too_little_memory_for_the_cache(bundled):
    """vLLM refuses a cache that cannot hold one request; its reason is passed on."""
    with pytest.raises(InputError, match=r"could not load model .* cache"):
        ft.load_engine(
            bundled.model,
            bundled.adapter,
            engine="vllm",
            vllm_arguments={"kv_cache_memory_bytes": 2**16},
        )


def test_blocks_that_run_out_void_the_recording(engine, prompt, tmp_path):
    """No block is left for the next token: vLLM preempts the request, which is said, and what was recorded stays."""
    pool = engine.host.scheduler.kv_cache_manager.block_pool
    taken = []

    def on_progress(what, done, total):
        if done == 3 and not taken:
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))

    room = engine.paged[0].block_size
    ids = (prompt.ids * 8)[: room - 3]
    encoded = type(prompt)(**{**_fields(prompt), "ids": tuple(ids)})
    try:
        with pytest.raises(RecordingError, match=r"preempted|scheduled 0 tokens"):
            ft.trace_pair(
                engine,
                prompt=encoded,
                reduction="unsplit",
                attempts=1,
                max_new_tokens=12,
                observer_control=False,
                directory=tmp_path / "pair",
                progress=on_progress,
            )
    finally:
        pool.free_blocks(taken)
    assert steps_of(tmp_path / "pair" / "reference.trace") >= 3


def _fields(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
