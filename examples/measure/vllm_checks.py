"""Checks of the vLLM plugin on a GPU; the mode `check` of vllm_shrink.py."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_processes import (
    GRAPHS_ONLY,
    SHAPES,
    Engine,
    close_all,
    engine_options,
    environment,
    wait_for_all,
    write_adapter,
    write_model,
    write_opposite,
)

QUESTIONS = [
    "Tom has 3 boxes with 12 apples each and eats 5 apples. How many are left?",
    "A train needs 2 hours for 150 km. How far does it come in 5 hours?",
    "Write one sentence about the sea.",
    "Anna is twice as old as Ben, who is 9. How old will Anna be in 4 years?",
]
#: For a model without a tokenizer.
PROMPTS_OF_IDS = [list(range(1000, 1040))]
TOKENS = 48
COUNTED = {"FLIPTRACE_COUNT_LAUNCHES": "1"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
REPEATABLE = ("local", "deterministic:8", "tree:8", "unsplit")

# Name, label, what differs in the options, what differs in the environment.
# torch.compile takes half a minute of an engine's start, so only the two that are about it have it.
SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
GRAPHS = {"compilation_config": GRAPHS_ONLY | SIZES}
ENGINES: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("bare", "bare", GRAPHS, INVARIANT),
    ("off", "vllm", GRAPHS, INVARIANT),
    ("eager", "local", {"enforce_eager": True}, COUNTED),
    ("compiled", "local", {"compilation_config": {"cudagraph_mode": "NONE"}}, COUNTED),
    ("default", "local", {"compilation_config": SIZES}, COUNTED),
    ("invariant", "local", GRAPHS, COUNTED | INVARIANT),
    ("local", "local", GRAPHS, COUNTED),
    ("deterministic", "deterministic:8", GRAPHS, COUNTED),
    ("tree", "tree:8", GRAPHS, COUNTED),
    ("unsplit", "unsplit", GRAPHS, COUNTED),
    ("atomic", "atomic:8", GRAPHS, COUNTED),
]
TWO_GPUS = ("two-gpus", "local", GRAPHS | {"tensor_parallel_size": 2}, COUNTED)

REFUSED = [
    ("bogus", {}, "FLIPTRACE_SHRINK must name a reduction"),
    ("local", {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}, "does not cover VLLM_LORA_ENABLE_DUAL_STREAM"),
    ("atomic:8", INVARIANT, "VLLM_BATCH_INVARIANT=1 asks for bits that do not change"),
]


class Book:
    """Writes down what was checked; `passed` says whether all of it held."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self.passed = True

    def note(self, check: str, ok: bool | None, detail: object) -> None:
        """Write one line; ok is None for what is only told."""
        self.passed &= ok is not False
        self._file.write(json.dumps({"check": check, "ok": ok, "detail": detail}) + "\n")
        self._file.flush()
        word = {True: "ok  ", False: "FAIL", None: "    "}[ok]
        print(f"{word} {check}: {str(detail)[:300]}", flush=True)

    def attempt(self, check: str, run: Callable[[], None]) -> None:
        """Run a group of checks; what it raises is a failure of its own."""
        try:
            run()
        except (RuntimeError, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            self.note(check, False, f"{type(error).__name__}: {error}")


def check(options: argparse.Namespace) -> bool:
    """Run all checks; True if all hold."""
    book = Book(options.out / "check.jsonl")
    opposite = write_opposite(options.scratch / "opposite", Path(options.adapter))
    refusals = {
        number: subprocess.Popen(
            [sys.executable, "-c", f"import vllm; vllm.EngineArgs(model={options.model!r})"],
            env=environment(options.scratch, f"refused-{number}", label, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, (label, more, _) in enumerate(REFUSED)
    }
    plans = list(ENGINES)
    if count_gpus() > 1:
        plans.append(TWO_GPUS)
    else:
        book.note("two GPUs", None, "not run: there is one GPU")
    if options.only:
        plans = [plan for plan in plans if plan[0] in options.only]
    server = None if options.skip_server else start_server(options)
    engines = {}
    for name, label, changes, more in plans:
        llm = engine_options(options.attention_backend) | {
            "model": options.model,
            "enable_lora": True,
            "max_lora_rank": 16,
            "max_loras": 2,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 1 << 30,
        }
        adapters = [options.adapter, str(opposite)]
        if name == TWO_GPUS[0]:
            # Of no weights of its own: the 9 heads of SmolLM2-135M cannot be dealt to two GPUs.
            shape = SHAPES["llama-3.2-3b"]
            llm |= {
                "model": str(write_model(options.scratch / "two-gpus", shape)),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "distributed_executor_backend": "mp",
            }
            folder = options.scratch / "two-gpus-adapter"
            adapters = [str(write_adapter(folder, shape, rank=16, seed=16))]
        settings = {"options": llm | changes, "adapters": adapters}
        variables = environment(options.scratch, name, label, **more)
        engines[name] = Engine(options.out, name, settings, variables)
    try:
        ready = set(wait_for_all(list(engines.values()), options.deadline))
        for name, engine in engines.items():
            if engine not in ready:
                book.note(f"{name}: starts", False, engine.facts["error"])
        running = {name: engine for name, engine in engines.items() if engine in ready}
        labels = {name: label for name, label, _, _ in plans}
        check_engines(book, running, labels)
        if server is not None:
            started = server
            book.attempt("server", lambda: check_server(book, started, options.deadline))
    finally:
        close_all(engines.values())
        if server is not None:
            stop_server(server)
    for number, (label, _, wanted) in enumerate(REFUSED):
        output, _ = refusals[number].communicate(timeout=120)
        code = refusals[number].returncode
        book.note(f"refused: {label}", code != 0 and wanted in output, output[-300:])
    return book.passed


def check_engines(book: Book, engines: dict[str, Engine], labels: dict[str, str]) -> None:
    """Check every engine that runs, then what they say of each other."""
    alone: dict[str, list[int]] = {}
    for name, engine in engines.items():
        if name in ("bare", "off"):
            continue
        prompts = PROMPTS_OF_IDS
        if name != TWO_GPUS[0]:
            prompts = engine.ask("chat", texts=QUESTIONS)["prompts"]

        def one(name: str = name, engine: Engine = engine, prompts: list[Any] = prompts) -> None:
            alone[name] = check_plugin(book, name, engine, labels[name], prompts)

        book.attempt(name, one)
    if "off" in engines:
        book.attempt("off", lambda: check_off(book, engines))
    if "invariant" in engines:
        book.attempt("several adapters", lambda: check_several(book, engines))
    for name in sorted(set(alone) - {"local"}):
        if "local" in alone:
            same = alone[name] == alone["local"]
            book.note(f"{name}: same tokens as local with graphs", None, same)


def check_plugin(
    book: Book, name: str, engine: Engine, label: str, prompts: list[list[int]]
) -> list[int]:
    """Check that the shrink is installed, runs on the device as often as it must, and repeats."""
    facts = engine.facts
    book.note(
        f"{name}: the plugin leaves CUDA alone",
        facts["cuda_initialised_by_plugins"] is False,
        facts["plugin_modules"],
    )
    before = engine.ask("status")["status"]
    arguments = {"tokens": TOKENS, "ignore_eos": True}
    single = {"prompts": prompts[:1], "adapters": [0], **arguments}
    first = engine.ask("generate", **single)["tokens"]
    after = engine.ask("status")["status"]
    again = engine.ask("generate", **single)["tokens"]
    for old, new in zip(before, after, strict=True):
        kind = label.partition(":")[0]
        ok = new["installed"] and new["reduction"].startswith(kind) and kind in new["kernel"]
        book.note(f"{name}: installed in rank {new['rank']}", bool(ok or kind == "tree"), new)
        ran, wanted = new["launches"] - old["launches"], TOKENS * new["layers"]
        book.note(
            f"{name}: launches of rank {new['rank']} in one generation",
            ran == wanted and ran > 0,
            f"{ran} on the device; {TOKENS} forward passes x {new['layers']} layers = {wanted}",
        )
    if label in REPEATABLE:
        book.note(f"{name}: repeats", first == again, f"{len(first[0])} tokens, twice")
    log = engine.log.read_text(errors="replace")
    said = re.findall(r"Every LoRA shrink of rank \d+ runs .*", log)
    book.note(f"{name}: each worker says it once", len(said) == len(after), said)
    return first[0]


def check_off(book: Book, engines: dict[str, Engine]) -> None:
    """Check that an unset variable changes nothing: no module, no answer, the same tokens."""
    off = engines["off"]
    modules = off.facts["plugin_modules"]
    wanted = ["fliptrace_kernels", "fliptrace_kernels.vllm_plugin"]
    book.note("off: only the entry point is imported", modules == wanted, modules)
    try:
        book.note("off: status refuses", False, off.ask("status"))
    except RuntimeError as error:
        book.note("off: status refuses", "without the plugin" in str(error), str(error))
    if "bare" not in engines:
        return
    bare = engines["bare"]
    book.note("bare: no plugin in sight", bare.facts["plugin_modules"] == [], None)
    prompts = off.ask("chat", texts=QUESTIONS)["prompts"]
    arguments = {"prompts": prompts, "adapters": [0, 1, None, 0], "tokens": TOKENS}
    same = off.ask("generate", **arguments)["tokens"] == bare.ask("generate", **arguments)["tokens"]
    book.note("off: the same tokens as without the plugin (batch-invariant)", same, None)


def check_several(book: Book, engines: dict[str, Engine]) -> None:
    """Check that an output does not depend on the other adapters in its batch.

    The same is asked of vLLM as it is and of requests without adapters: what changes there too is not the shrink's.
    """
    prompts = engines["invariant"].ask("chat", texts=QUESTIONS)["prompts"]
    prompts = [*prompts, *prompts[:2]]
    adapters = [0, 1, None, 0, None, 1]
    nothing = [None] * len(prompts)
    base = unlike_alone(engines["invariant"], prompts, nothing)[1]
    together, changed = unlike_alone(engines["invariant"], prompts, adapters)
    told = f"outputs unlike those alone: {changed}; without adapters: {base}"
    if "off" in engines:
        told += f"; vLLM's own shrink: {unlike_alone(engines['off'], prompts, adapters)[1]}"
    book.note(
        "several adapters: in one batch as alone, under VLLM_BATCH_INVARIANT=1",
        None if base else not changed,
        told,
    )
    # The same question with an adapter, its opposite and none: 0 and 4, 1 and 5.
    differs = together[0] != together[4]
    book.note("several adapters: the adapter changes the output", differs, None)


def unlike_alone(
    engine: Engine, prompts: list[Any], adapters: list[int | None]
) -> tuple[list[list[int]], list[str]]:
    """Generate in one batch; say which outputs are others than alone, and from which token on."""
    together = engine.ask("generate", prompts=prompts, adapters=adapters, tokens=TOKENS)["tokens"]
    changed = []
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        answer = engine.ask("generate", prompts=[prompt], adapters=[adapter], tokens=TOKENS)
        (alone,) = answer["tokens"]
        if alone != together[number]:
            same = [x == y for x, y in zip(alone, together[number], strict=False)]
            changed.append(f"{number} from token {(*same, False).index(False)}")
    return together, changed


@dataclass(frozen=True)
class Server:
    """A server that was started; it may not be up yet."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path


def start_server(options: argparse.Namespace) -> Server:
    """Start a server that counts launches; it gets ready while the engines do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = environment(
        options.scratch,
        "server",
        "local",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_LOGGING_LEVEL="INFO",
        **COUNTED,
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", options.model, "--served-model-name", "base"]
    command += ["--enable-lora", "--max-lora-rank", "16", "--lora-modules"]
    command += [f"gsm8k={options.adapter}", "--dtype", "bfloat16", "--max-model-len", "1024"]
    command += ["--max-num-seqs", "8", "--gpu-memory-utilization", "0.02"]
    # Without it vLLM kills its workers at once, and a worker that is killed says nothing at its end.
    command += ["--shutdown-timeout", "20"]
    command += ["--kv-cache-memory-bytes", str(1 << 30), "--no-enable-prefix-caching"]
    command += ["--compilation-config", json.dumps(GRAPHS_ONLY | SIZES)]
    if options.attention_backend:
        command += ["--attention-backend", options.attention_backend]
    log_path = options.out / "logs" / "server.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=variables, start_new_session=True
        )
    return Server(process, f"http://127.0.0.1:{port}", log_path)


def stop_server(server: Server) -> None:
    """End a server as its user would, then whatever is left of it."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)


def check_server(book: Book, server: Server, deadline: float) -> None:
    """Check that it answers with an adapter, tells its status over HTTP, and logs at its end."""
    while not is_up(server.address):
        if server.process.poll() is not None or time.monotonic() > deadline:
            book.note("server: starts", False, f"see {server.log}")
            return
        time.sleep(1)
    asked = {"model": "gsm8k", "prompt": QUESTIONS[0], "max_tokens": 8, "temperature": 0}
    method = {"method": "fliptrace_shrink_status"}
    (before,) = post(f"{server.address}/collective_rpc", method)["results"]
    text = post(f"{server.address}/v1/completions", asked)["choices"][0]["text"]
    (after,) = post(f"{server.address}/collective_rpc", method)["results"]
    ok = after["installed"] and after["launches"] > before["launches"]
    book.note("server: /collective_rpc tells its status", ok, {"after": after, "text": text})
    stop_server(server)
    said = re.findall(r"Rank \d+ ends: \d+ launches.*", server.log.read_text(errors="replace"))
    book.note("server: a line at its end", bool(said), said)


def is_up(address: str) -> bool:
    """Tell whether the server answers."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:  # noqa: S310
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def post(address: str, body: dict[str, Any]) -> Any:
    """Send JSON and read JSON."""
    request = urllib.request.Request(  # noqa: S310
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def count_gpus() -> int:
    """Count the GPUs without touching CUDA here."""
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return found.stdout.count("GPU ")
