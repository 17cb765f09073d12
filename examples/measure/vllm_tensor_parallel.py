r"""Tensor parallel in the vllm engine: what recording costs, and pairs with a root on one rank, proved by substitution.

    python examples/measure/vllm_tensor_parallel.py --out tensor_parallel.jsonl --seconds 280
    python examples/measure/vllm_tensor_parallel.py --out rows.jsonl --layers 2 --hidden 128 --inner 256 --heads 4 \
        --kv-heads 2 --vocabulary 768 --reduction atomic:8 --tokens 24 --rounds 2 --pair-tokens 12     (small, CPU)

On two H200s, with NVLink multicast off and Triton attention (five minutes):

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_NO_USAGE_STATS=1 \
    PYTHONPATH=tracer:interventions:kernels python examples/measure/vllm_tensor_parallel.py --out rows.jsonl \
        --seconds 280 --attention TRITON_ATTN --vllm-arguments '{"gpu_memory_utilization": 0.2}'

Makes a Llama of its own with random weights, and a random adapter on all projections, in a temporary folder; nothing is
downloaded. Each stage adds a row to --out as soon as it is done, with the command and the environment in the first:

    cost    three arms take turns, another order each round: ``alone`` (vLLM generates with nothing of ours in it),
            ``unrecorded`` (the tracer steps it) and ``recorded`` (the same, into a trace). Ratios are per round, of
            decoding, and their median counts.
    repeat  under unsplit two recordings are bit-equal.
    plant   one element of one rank's shrink is changed: the diff must name that site, rank, step, position and index,
            and nothing before it.
    pair    executions under --reduction until one differs: the first root by rank, shrinks on which ranks disagree
            within one execution, both executions rebuilt bit by bit, and one coordinate of one rank put in, with its
            receipts.

Exit code 1 if a stage found what must not be (the row says which), 2 if one could not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

import fliptrace as ft
from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.capture.vllm_engine import OWN_REDUCTION
from fliptrace.capture.vllm_engine.tensor_parallel import TensorParallelEngine
from fliptrace.manifest import Manifest
from fliptrace.numerics import integer_view
from fliptrace.pair import bundled_model
from fliptrace.store import TraceWriter
from fliptrace.trace import Closing
from fliptrace_interventions import ShrinkEdit, Workbench

ARMS = ("alone", "unrecorded", "recorded")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16


def make_model(root: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Write a random model with the bundled tokenizer, and a random adapter; returns their folders."""
    from safetensors.torch import save_file

    bundled = Path(str(bundled_model().model))
    model, adapter = root / "model", root / "adapter"
    model.mkdir()
    adapter.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled / name, model / name)
    hidden, inner, head = options.hidden, options.inner, options.hidden // options.heads
    key_values = options.kv_heads * head
    vocabulary = options.vocabulary
    configuration = json.loads((bundled / "config.json").read_text())
    configuration |= {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "dtype": options.dtype,
    }
    (model / "config.json").write_text(json.dumps(configuration, indent=1))
    place = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device=place).manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw, device=place) * scale).to(dtype).cpu()

    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_values, hidden),
        "self_attn.v_proj": (key_values, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": normal(vocabulary, hidden, scale=hidden**-0.5),
    }
    deltas = {}
    for layer in range(options.layers):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{start}.{name}.weight"] = torch.ones(hidden, dtype=dtype)
        for name, (rows, columns) in shapes.items():
            weights[f"{start}.{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            key = f"base_model.model.{start}.{name}"
            deltas[f"{key}.lora_A.weight"] = normal(RANK, columns, scale=columns**-0.5)
            deltas[f"{key}.lora_B.weight"] = normal(rows, RANK, scale=0.1)
    if place == "cuda":
        torch.cuda.empty_cache()  # the ranks want the memory
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    save_file(deltas, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "random",
                "r": RANK,
                "lora_alpha": 2 * RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "fan_in_fan_out": False,
                "init_lora_weights": True,
                "target_modules": list(PROJECTIONS),
            }
        )
    )
    return model, adapter


class Session:
    """One engine, the rows that it gives, and the time that is left."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Make the model and load it on all ranks."""
        self.options, self.folder = options, folder
        self.begin = time.monotonic()
        self.failed = 0
        model, adapter = make_model(folder, options)
        made = time.monotonic() - self.begin
        arguments = {"tensor_parallel_size": options.ranks, **(options.vllm_arguments or {})}
        self.engine = ft.load_engine(
            str(model),
            str(adapter),
            engine="vllm",
            attention=options.attention,
            vllm_arguments=arguments,
        )
        self.prompts = [
            ft.encode_prompt(self.engine.tokenizer, prompt.text)
            for prompt in bundled_model().prompts
        ]
        described = self.engine.describe()
        self.add(
            "setting",
            {
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "seconds_model": round(made, 1),
                "seconds_load": round(time.monotonic() - self.begin - made, 1),
                "model": {
                    name: getattr(options, name)
                    for name in ("layers", "hidden", "inner", "heads", "kv_heads", "vocabulary")
                },
                "rank": RANK,
                "sites": len(self.engine.sites),
                "attention": described["model"]["attention"],
                "tensor_parallel": described["engine"]["tensor_parallel"],
                "settings": described["engine"]["settings_read_in_worker"],
                "environment": described["environment"],
            },
        )

    def add(self, what: str, row: dict[str, Any]) -> None:
        """Write a row at once."""
        line = {"what": what, "at_seconds": round(time.monotonic() - self.begin, 1), **row}
        with self.options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {
            key: value for key, value in line.items() if key not in ("environment", "settings")
        }
        print(json.dumps(shown)[:1500], flush=True)

    def close(self) -> None:
        """End the ranks."""
        if isinstance(self.engine, TensorParallelEngine):
            self.engine.close()

    @property
    def left(self) -> float:
        """Seconds."""
        return float(self.options.seconds) - (time.monotonic() - self.begin)

    def record(
        self,
        prompt: ft.Prompt,
        path: Path,
        tokens: int,
        on_choice: Callable[..., None] | None = None,
    ) -> tuple[int, ...]:
        """Record a greedy execution under the reduction that is set."""
        prompt_section = {"ids_sha256": str(prompt.ids), "ids": list(prompt.ids)}
        writer = TraceWriter(path, Manifest({**self.engine.describe(), "prompt": prompt_section}))
        recorder = Recorder(self.engine, writer, RecorderOptions())

        def note(step: int, choice: Any, logits: torch.Tensor) -> None:
            recorder.complete_step(step, choice, logits)
            if on_choice is not None:
                on_choice(step, choice, logits)

        with self.engine.observed(recorder):
            execution = generate(
                self.engine, prompt.ids, max_new_tokens=tokens, end_ids=set(), on_choice=note
            )
            recorder.finish()
        writer.close(Closing(complete=True, stop_reason="max new tokens", steps=tokens))
        return execution.token_ids


def cost(session: Session) -> None:
    """Measure the arms in turns."""
    options, engine = session.options, session.engine
    if not isinstance(engine, TensorParallelEngine):
        raise SystemExit("the cost is measured with two ranks or more: --ranks 2")
    simulated = engine.simulates_atomics and options.reduction.startswith("atomic")
    engine.set_reduction(options.reduction, 0 if simulated else None)
    prompt, tokens = session.prompts[0], options.tokens

    def run(arm: str, number: int) -> float:
        """Seconds per decode step; all arms begin to count after the second token."""
        if arm == "alone":
            return statistics.fmean(engine.generate_alone(prompt.ids, tokens)[2:])
        marks: list[float] = []

        def mark(_step: int, _choice: Any, _logits: Any) -> None:
            marks.append(time.perf_counter())

        if arm == "recorded":
            session.record(prompt, session.folder / f"cost{number}.trace", tokens, mark)
        else:
            generate(engine, prompt.ids, max_new_tokens=tokens, end_ids=set(), on_choice=mark)
        return (marks[-1] - marks[1]) / (len(marks) - 2)

    for arm in ARMS:
        run(arm, -1)
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        order = ARMS[number % 3 :] + ARMS[: number % 3]
        rounds.append({arm: run(arm, number) for arm in order})
    ratios = [one["recorded"] / one["unrecorded"] for one in rounds]
    whole = [one["recorded"] / one["alone"] for one in rounds]
    session.add(
        "cost",
        {
            "reduction": options.reduction,
            "tokens": tokens,
            "prompt_tokens": len(prompt.ids),
            "rounds_ms": [{arm: round(1e3 * one[arm], 3) for arm in ARMS} for one in rounds],
            "median_ms": {
                arm: round(1e3 * statistics.median(one[arm] for one in rounds), 3) for arm in ARMS
            },
            "recorded_to_unrecorded": round(statistics.median(ratios), 4),
            "recorded_to_unrecorded_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
            "recorded_to_alone": round(statistics.median(whole), 4),
            "unrecorded_to_alone": round(
                statistics.median(one["unrecorded"] / one["alone"] for one in rounds), 4
            ),
        },
    )


def repeat(session: Session) -> None:
    """Record twice under unsplit; everything must be equal."""
    session.engine.set_reduction("unsplit")
    paths = [session.folder / f"repeat{number}.trace" for number in range(2)]
    for path in paths:
        session.record(session.prompts[0], path, 24)
    with ft.diff_traces(*paths) as pair:
        equal = str(pair.diff.outcome) == "identical" and pair.diff.statistics.differing == 0
        session.add("repeat", {"reduction": "unsplit", "tokens": 24, "identical": equal})
    session.failed |= not equal


class Plant:
    """Changes one element of one rank's shrink, in one step, by some ULP of BF16."""

    def __init__(self, engine: Any, site: int, step: int, index: int) -> None:
        """Choose where."""
        self.engine, self.site, self.step, self.index = engine, site, step, index

    def __call__(self, site: int, _operand: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See ShrinkInterceptor."""
        if site != self.site or self.engine.step_number != self.step:
            return z
        changed = z.clone()
        element = integer_view(changed)[-1, self.index]
        element += 1 << 18  # four units of BF16's last place
        return changed


def plant(session: Session) -> None:
    """Change one element on the last rank; the diff must name it."""
    engine, prompt = session.engine, session.prompts[1]
    engine.set_reduction("unsplit")
    wanted = [
        number
        for number, site in enumerate(engine.sites)
        if site.parallel_rank == session.options.ranks - 1
    ]
    places = (
        wanted[0],
        wanted[len(wanted) // 2],
        next(number for number in wanted if engine.sites[number].module.endswith("down_proj")),
    )
    for number, (site, step) in enumerate(zip(places, (0, 3, 5), strict=True)):
        paths = [session.folder / f"plant{number}-{name}.trace" for name in ("without", "with")]
        session.record(prompt, paths[0], 8)
        with engine.intercepted(Plant(engine, site, step, 5)):
            session.record(prompt, paths[1], 8)
        with ft.diff_traces(*paths) as pair:
            first = pair.diff.first_surviving
            found = None if first is None else (first.site.path, first.step, first.position)
            position = len(prompt.ids) - 1 + step
            expected = (engine.sites[site].path, step, position)
            coordinates = (
                [] if first is None else [each.coordinate.rank_index for each in first.coordinates]
            )
            # Every rank's shrinks before that place, and the other ranks' at that place, keep their bits.
            before = range(site - site % session.options.ranks + session.options.ranks)
            bits = [
                [
                    integer_view(trace.record(engine.sites[each].path, ft.Kind.SHRINK, step))
                    for each in before
                ]
                for trace in (pair.reference, pair.candidate)
            ]
            unchanged = [each for each in before if torch.equal(bits[0][each], bits[1][each])]
            alone = [each for each in before if each != site]
            right = found == expected and coordinates == [5] and unchanged == alone
            session.add(
                "plant",
                {
                    "planted": list(expected),
                    "found": None if found is None else list(found),
                    "rank_indices": coordinates,
                    "only_there": unchanged == alone,
                    "right": right,
                },
            )
        session.failed |= not right


def pairs(session: Session) -> Iterator[Path]:
    """Record pairs until the time is short; yields folders of those that differ."""
    options = session.options
    for number, prompt in enumerate(session.prompts):
        if session.left < 45:
            return
        folder = session.folder / f"pair{number}"
        simulated = session.engine.simulates_atomics
        with ft.trace_pair(
            session.engine,
            prompt=prompt,
            reduction=options.reduction,
            attempts=options.attempts,
            max_new_tokens=options.pair_tokens,
            seed=17 * number if simulated else 0,
            until="token",
            directory=folder / "traces",
        ) as pair:
            first = pair.diff.first_propagating or pair.diff.first_surviving
            agreement = [
                None
                if found is None
                else {**dataclasses.asdict(found), "first": found.first and found.first.name}
                for found in pair.diff.rank_agreement
            ]
            session.add(
                "pair",
                {
                    "prompt": number,
                    "reduction": options.reduction,
                    "outcome": str(pair.diff.outcome),
                    "flip_step": None if pair.diff.flip is None else pair.diff.flip.step,
                    "first_root": None if first is None else first.name,
                    "site": None if first is None else first.site.path,
                    "rank": None if first is None else first.site.parallel_rank,
                    "differing_shrinks": pair.diff.statistics.differing,
                    "ranks_agree": agreement,
                },
            )
            if first is None:
                continue
            pair.save(folder / "saved")
        yield folder / "saved"


def prove(session: Session, folder: Path) -> None:
    """Rebuild both executions and put one coordinate of one rank in."""
    with ft.load_pair(folder) as pair:
        target = None
        if pair.diff.flip is None:
            first = pair.diff.first_propagating or pair.diff.first_surviving
            target = first.step if first is not None else 0
        workbench = Workbench(pair, session.engine, target=target, shams=0)
        rebuilt = [found.equal for found in workbench.reconstruct()]
        session.add("rebuilt", {"pair": folder.parent.name, "bit_equal": rebuilt})
        session.failed |= not all(rebuilt)
        root = pair.diff.first_propagating or pair.diff.first_surviving
        if root is None or session.left < 20:
            return
        edit = ShrinkEdit.of_coordinate(root.coordinates[0])
        verdict = workbench.prove([edit], free=False, shams=0)
        receipts = [
            {
                "recipient": direction.recipient,
                "place": receipt.place,
                "before": receipt.digest_before,
                "written": receipt.digest_written,
                "consumed": receipt.digest_consumed,
                "landed": receipt.landed,
            }
            for direction in verdict.directions
            if direction.edited is not None
            for receipt in direction.edited.receipts
        ]
        session.add(
            "edit",
            {
                "pair": folder.parent.name,
                "edit": edit.name,
                "judgement": str(verdict.judgement),
                "reasons": list(verdict.reasons),
                "receipts": receipts,
            },
        )
        session.failed |= not receipts or not all(each["landed"] for each in receipts)


def main() -> int:
    """Run the stages that are asked for, as long as there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--seconds", type=float, default=280.0, help="no stage begins after them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", default="cost,repeat,plant,pair")
    parser.add_argument("--reduction", default=OWN_REDUCTION)
    parser.add_argument(
        "--attention", default="sdpa", help="a backend of vLLM, such as TRITON_ATTN"
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96, help="of each arm of the cost")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pair-tokens", type=int, default=48)
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--proofs", type=int, default=2, help="pairs that are proved at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm-arguments", type=json.loads, default=None, help="JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stages = options.stages.split(",")
    with tempfile.TemporaryDirectory(prefix="fliptrace-tp-") as name:
        try:
            session = Session(options, Path(name))
        except BaseException:
            show_logs()
            raise
        try:
            for stage, run in (("cost", cost), ("repeat", repeat), ("plant", plant)):
                if stage in stages and session.left > 0:
                    attempt(session, stage, run)
            if "pair" in stages:
                attempt(session, "pair", prove_some)
        finally:
            session.close()
    return int(session.failed)


def show_logs() -> None:
    """Print the ends of what ranks of a group that failed have printed."""
    for path in sorted(Path(tempfile.gettempdir()).glob("fliptrace-ranks-*/rank*.log")):
        print(f"== {path}\n{path.read_text(errors='replace')[-6000:]}", file=sys.stderr)


def attempt(session: Session, stage: str, run: Callable[[Session], None]) -> None:
    """Run a stage; what goes wrong in one is a row, and the next still runs if the ranks live."""
    begin = time.monotonic()
    try:
        run(session)
    except Exception as error:  # noqa: BLE001  (a row)
        traceback.print_exc()
        show_logs()
        session.failed |= 2
        session.add("trouble", {"stage": stage, "error": f"{type(error).__name__}: {error}"})
    session.add("stage", {"stage": stage, "seconds": round(time.monotonic() - begin, 1)})


def prove_some(session: Session) -> None:
    """Prove the first pairs that differ."""
    for number, folder in enumerate(pairs(session), start=1):
        prove(session, folder)
        if number >= session.options.proofs:
            return


if __name__ == "__main__":
    sys.exit(main())
