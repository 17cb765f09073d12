"""Run every shrink under compute-sanitizer's memcheck and say what it found.

    python examples/measure/shrink_memcheck.py --folder results

Takes about a minute on an NVIDIA H200. compute-sanitizer comes with the CUDA toolkit, and as
`pip install nvidia-cuda-sanitizer-api`. Every tensor ends where its memory ends
(PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that one element too far is seen.

Two counts are told apart. A memory error is an access that a kernel must not make. An API error is a
call of CUDA that returned an error to whoever called it, such as a question for a function that this
driver does not have; the sanitizer adds both up in its ERROR SUMMARY. `--report-api-errors explicit`
keeps API errors in the log with their stacks, and the same sanitizer runs on a program of torch alone,
to show which of them come without any kernel of ours.

Writes memcheck.json, memcheck-sanitizer.log (all errors), memcheck-torch.log (torch alone) and
memcheck-calls.log (what the calls printed); all are overwritten, so redirect this script elsewhere.
Exit code 1 for a memory error or a wrong output, 2 if the sanitizer could not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import shrink_stress as stress
import torch
from shrink_mutants import delays_shape, run_mutant

from fliptrace_kernels import FliptraceKernelsError, lora_shrink
from fliptrace_kernels.bench.device import require_cuda, this_machine

NAMES = ("unsplit", "atomic:8", "atomic:vllm", "tree:8", *stress.REDUCTIONS)
LOCAL = tuple(name for name in NAMES if name.startswith("local"))
ROWS = (3, 130)
TORCH_ALONE = """
import torch
x = torch.randn(64, 64, device="cuda").bfloat16()
(x @ x).float().sum().item()
torch.cuda.synchronize()
"""
TOOL = ("--tool", "memcheck", "--target-processes", "application-only", "--print-limit", "0")

_API_ERROR = re.compile(r"Program hit (.*) on CUDA API call to (\w+)")


@dataclass(frozen=True)
class Findings:
    """What a log of memcheck holds.

    Attributes:
        total: the number of its ERROR SUMMARY.
        api: how often a call of the API returned an error, by "call: error".
        memory: first lines of all other errors.
    """

    total: int
    api: Counter[str]
    memory: list[str]

    @property
    def memory_errors(self) -> int:
        """Whatever is not an API error, listed or not."""
        return max(self.total - self.api.total(), len(self.memory))


def read_log(text: str) -> Findings:
    """Take a log of memcheck apart.

    Raises:
        ValueError: if there is no ERROR SUMMARY: the sanitizer did not finish.
    """
    api: Counter[str] = Counter()
    memory = []
    total = None
    for line in text.splitlines():
        # A further space begins what belongs to the error above.
        if not line.startswith("========= ") or line.startswith("=========  "):
            continue
        said = line.removeprefix("========= ")
        if found := _API_ERROR.match(said):
            api[f"{found.group(2)}: {found.group(1)}"] += 1
        elif found := re.match(r"ERROR SUMMARY: (\d+) error", said):
            total = int(found.group(1))
        elif said.strip() not in ("", "COMPUTE-SANITIZER") and not said.startswith("Warning"):
            memory.append(said)
    if total is None:
        raise ValueError("there is no ERROR SUMMARY in the sanitizer's log: it did not finish")
    return Findings(total, api, memory)


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer: on PATH, of the CUDA toolkit, or installed by pip."""
    installed = Path(sysconfig.get_path("purelib")) / "nvidia"
    places = [Path("/usr/local/cuda/bin"), *installed.glob("cu*/bin")]
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=place))),
        None,
    )


def run_calls(seed: int) -> int:
    """Run every reduction and the delayed kernel on tensors of their own; 0 if outputs agree."""
    stress.compile_local(LOCAL, ROWS)
    numbers = stress.Numbers(1 << 24, "cuda", seed)
    count = wrong = 0
    for family in stress.FAMILIES:
        for rows in ROWS:
            case = stress.Case(family, rows, 0.7, 0, (0,) * family.slices, rows)
            x, weights, mapping = numbers.tensors(case)
            # A view of a pool hides what a kernel reads beyond its end.
            x, weights = x.clone(), [a.clone() for a in weights]
            shape = delays_shape(x, weights, stress.MUTANT_REDUCTION)
            delays = torch.zeros(shape, dtype=torch.int32, device="cuda")
            outputs = [
                lora_shrink(x, weights, mapping, reduction=name, scale=case.scale) for name in NAMES
            ]
            outputs.append(
                run_mutant(
                    stress.FAITHFUL,
                    x,
                    weights,
                    mapping,
                    reduction=stress.MUTANT_REDUCTION,
                    scale=case.scale,
                    delays=delays,
                )
            )
            count += len(outputs)
            wrong += sum(
                not torch.allclose(out, outputs[0], rtol=1e-3, atol=1e-2) for out in outputs
            )
    torch.cuda.synchronize()
    print(f"{count} calls, {wrong} far from unsplit: {this_machine()}", flush=True)
    return 1 if wrong else 0


def sanitize(sanitizer: str, log: Path, program: Sequence[str]) -> tuple[int, str, Findings]:
    """Run a Python program under memcheck; returns its exit code, what it printed, and the findings."""
    log.unlink(missing_ok=True)
    command = [sanitizer, *TOOL, "--report-api-errors", "explicit", "--log-file", str(log)]
    done = subprocess.run(
        [*command, sys.executable, *program],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = log.read_text(errors="replace") if log.is_file() else ""
    try:
        return done.returncode, done.stdout, read_log(text)
    except ValueError as error:
        raise ValueError(f"{error}; see {log}\n{text}{done.stdout}") from error


def show(what: str, findings: Findings) -> None:
    """Print both counts and what they consist of."""
    api, memory = findings.api.total(), findings.memory_errors
    print(f"{what}: {memory} memory errors, {api} API errors", flush=True)
    for error, count in findings.api.most_common():
        print(f"  {count} x {error}", flush=True)
    for line in findings.memory[:20]:
        print(f"  {line}", flush=True)


def memcheck(options: argparse.Namespace) -> int:
    """Compile, run torch alone and then all calls under the sanitizer, and report."""
    started = time.monotonic()
    sanitizer = options.sanitizer or find_sanitizer()
    if sanitizer is None:
        print(
            "error: there is no compute-sanitizer on PATH, in /usr/local/cuda/bin or beside this Python; "
            "pip install nvidia-cuda-sanitizer-api, or name it with --sanitizer",
            file=sys.stderr,
        )
        return 2
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    # What `local` compiles would stay in this process, which launches nothing.
    stress.compile_all([name for name in (*NAMES, stress.FAITHFUL) if name not in LOCAL], print)
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    calls = [str(Path(__file__).resolve()), "--calls", "--seed", str(options.seed)]
    try:
        _, _, alone = sanitize(sanitizer, folder / "memcheck-torch.log", ["-c", TORCH_ALONE])
        code, printed, found = sanitize(sanitizer, folder / "memcheck-sanitizer.log", calls)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (folder / "memcheck-calls.log").write_text(printed)
    print(printed, end="", flush=True)
    show("torch alone", alone)
    show("shrinks", found)
    summary = {
        "machine": str(this_machine()),
        "calls_exit_code": code,
        "memory_errors": found.memory_errors,
        "memory": found.memory,
        "api_errors": dict(found.api),
        "api_errors_of_torch_alone": dict(alone.api),
    }
    (folder / "memcheck.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"memcheck: {time.monotonic() - started:.0f} s", flush=True)
    return 1 if code or found.memory_errors else 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("shrink-bench"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--calls", action="store_true", help="the calls alone, as it runs them")
    options = parser.parse_args()
    try:
        require_cuda()
        return run_calls(options.seed) if options.calls else memcheck(options)
    except FliptraceKernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
