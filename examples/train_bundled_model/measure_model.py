"""Measure accuracy, margins and divergence of a model with a LoRA adapter.

Divergence here is simulated: each LoRA shrink is computed as `SPLITS` FP32 partial sums over
K blocks of `BLOCK` dealt round-robin, and the partials are added in an order drawn per output
element from a seeded generator, as atomics may do. The sum is then rounded to BF16, as the expand
step reads it. Two runs with different seeds differ in nothing else; a run that adds the partials
in one fixed order ("unsplit" below) checks that.

    python examples/train_bundled_model/measure_model.py FOLDER --prompts 100 --seeds 3 --batch 1

FOLDER holds `model/`, `adapter/` and `prompts.jsonl`. With --batch above 1 prompts are left-padded
and decoded together, which has other matrix shapes than a single prompt.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import held_out_problems
from peft import PeftModel
from solutions import final_answer
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

SPLITS = 8
BLOCK = 32
MARGIN_EDGES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Histogram edges of the top-2 logit margin; the first bin is exact ties."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the right number."""

    text: str
    answer: int


@dataclass(slots=True)
class Schedule:
    """Which arrival order the shrinks use: a generator, or None for the fixed order."""

    generator: torch.Generator | None = None


class ScheduledShrink(nn.Module):
    """Replaces `lora_A`: partial sums over dealt K blocks, added in the schedule's order."""

    def __init__(self, linear: nn.Linear, schedule: Schedule) -> None:
        super().__init__()
        self.weight = linear.weight
        self._schedule = schedule
        rank, width = linear.weight.shape
        blocks = width // BLOCK
        self._rounds = -(-blocks // SPLITS)
        if width % BLOCK or blocks % SPLITS:
            raise ValueError(f"width {width} does not give {SPLITS} equal splits of {BLOCK}")
        self._a = linear.weight.detach().float().reshape(rank, blocks, BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        """BF16 `[..., K]` to BF16 `[..., rank]`, summed in FP32."""
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        products = torch.einsum("...bk,rbk->...rb", blocks, self._a)
        dealt = products.unflatten(-1, (self._rounds, SPLITS))
        partials = dealt[..., 0, :]
        for index in range(1, self._rounds):
            partials = partials + dealt[..., index, :]
        if self._schedule.generator is not None:
            keys = torch.rand(
                partials.shape, generator=self._schedule.generator, device=partials.device
            )
            partials = partials.gather(-1, keys.argsort(-1))
        total = partials[..., 0]
        for index in range(1, SPLITS):
            total = total + partials[..., index]
        return total.to(x.dtype)


def load(
    model_folder: Path, adapter_folder: Path, device: str
) -> tuple[nn.Module, PreTrainedTokenizerBase, Schedule]:
    """Load everything in BF16 and put the scheduled shrink into every LoRA layer."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    base = LlamaForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    model = PeftModel.from_pretrained(base, adapter_folder, autocast_adapter_dtype=False)
    model.to(device=device, dtype=torch.bfloat16).eval()
    schedule = Schedule()
    for module in list(model.modules()):
        if hasattr(module, "lora_A"):
            for name, linear in list(module.lora_A.items()):
                module.lora_A[name] = ScheduledShrink(linear, schedule)
    return model, tokenizer, schedule


@dataclass(frozen=True, slots=True)
class Execution:
    """One greedy run over all questions.

    Attributes:
        tokens: per question the new token ids, with the end token if it was reached.
        margins: at each of them the FP32 difference of the two best BF16 logits.
        texts: the completions without special tokens.
    """

    tokens: list[list[int]]
    margins: list[list[float]]
    texts: list[str]


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    device: str,
    max_new_tokens: int,
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy decoding of one batch: new tokens and top-2 margins, as in `Execution`."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = encoded["input_ids"].to(device)
    mask = encoded["attention_mask"].to(device)
    accepted = inspect.signature(LlamaForCausalLM.forward).parameters
    cache = {"cache" if "cache" in accepted else "past_key_values": DynamicCache()}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    chosen, margins = [], []
    done = torch.zeros(len(ids), dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        ).logits[:, -1]
        best = logits.float().topk(2, dim=-1)
        token = logits.argmax(-1)
        chosen.append(token)
        margins.append(best.values[:, 0] - best.values[:, 1])
        done |= token == tokenizer.eos_token_id
        if (len(ids) == 1 or step % 8 == 7) and bool(done.all()):
            break
        ids = token[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
        positions = positions[:, -1:] + 1
    token_rows = torch.stack(chosen, 1).tolist()
    margin_rows = torch.stack(margins, 1).tolist()
    for index, row in enumerate(token_rows):
        if tokenizer.eos_token_id in row:
            end = row.index(tokenizer.eos_token_id) + 1
            token_rows[index], margin_rows[index] = row[:end], margin_rows[index][:end]
    return token_rows, margin_rows


def first_difference(reference: list[int], candidate: list[int]) -> int | None:
    """The first generated position with different tokens, None if the sequences are equal."""
    for index, (one, other) in enumerate(zip(reference, candidate, strict=False)):
        if one != other:
            return index
    return None if len(reference) == len(candidate) else min(len(reference), len(candidate))


def margin_histogram(margins: list[list[float]]) -> list[int]:
    """Counts over all steps: exact ties, then one count per interval of `MARGIN_EDGES`."""
    flat = [margin for row in margins for margin in row]
    counts = [sum(margin == 0.0 for margin in flat)]
    for low, high in itertools.pairwise((*MARGIN_EDGES, math.inf)):
        counts.append(sum(low < margin <= high for margin in flat))
    return counts


def compare(
    reference: Execution,
    candidates: list[Execution],
    questions: list[Question],
    piece: Callable[[int], str],
) -> dict[str, object]:
    """What differs between the reference run and each candidate run."""
    answers = [final_answer(text) for text in reference.texts]
    per_seed, flips = [], []
    pairs: Counter[str] = Counter()
    for candidate in candidates:
        row = {"diverged": 0, "answer_differs": 0, "became_right": 0, "became_wrong": 0}
        for index, question in enumerate(questions):
            one, other = reference.tokens[index], candidate.tokens[index]
            step = first_difference(one, other)
            if step is None:
                continue
            new_answer = final_answer(candidate.texts[index])
            row["diverged"] += 1
            row["answer_differs"] += new_answer != answers[index]
            row["became_right"] += answers[index] != question.answer == new_answer
            row["became_wrong"] += answers[index] == question.answer != new_answer
            pairs[" / ".join(sorted(piece(tokens[step]) for tokens in (one, other)))] += 1
            flips.append(
                {
                    "prompt": index,
                    "step": step,
                    "margin": reference.margins[index][step],
                    "answers": [answers[index], new_answer],
                    "right_answer": question.answer,
                    "texts": [reference.texts[index], candidate.texts[index]],
                }
            )
        per_seed.append(row)
    total = len(questions)
    repeats = total * len(candidates)
    changed = [flip for flip in flips if flip["answers"][0] != flip["answers"][1]]
    margins = sorted(flip["margin"] for flip in flips)
    steps = sorted(flip["step"] for flip in flips)
    return {
        "divergence_rate": len(flips) / repeats,
        "answer_difference_rate": len(changed) / repeats,
        "diverged_in_any_seed": len({flip["prompt"] for flip in flips}) / total,
        "answer_differs_in_any_seed": len({flip["prompt"] for flip in changed}) / total,
        "per_seed": per_seed,
        "flip_step_quartiles": [steps[len(steps) * q // 4] for q in (1, 2, 3)] if steps else None,
        "flip_margin_quartiles": [margins[len(margins) * q // 4] for q in (1, 2, 3)]
        if margins
        else None,
        "flip_token_pairs": dict(pairs.most_common(20)),
        "answer_flips": changed[:8],
    }


def measure(
    model_folder: Path,
    adapter_folder: Path,
    questions: list[Question],
    *,
    device: str,
    batch: int,
    seeds: int,
    max_new_tokens: int = 120,
) -> dict[str, object]:
    """Run schedule seed 0 and `seeds` further ones, and the fixed order twice; compare."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, tokenizer, schedule = load(model_folder, adapter_folder, device)

    def run(seed: int | None) -> Execution:
        schedule.generator = (
            None if seed is None else torch.Generator(device=device).manual_seed(seed)
        )
        tokens: list[list[int]] = []
        margins: list[list[float]] = []
        for start in range(0, len(questions), batch):
            texts = [question.text for question in questions[start : start + batch]]
            part = generate(model, tokenizer, texts, device, max_new_tokens)
            tokens += part[0]
            margins += part[1]
        return Execution(tokens, margins, tokenizer.batch_decode(tokens, skip_special_tokens=True))

    started = time.monotonic()
    reference = run(0)
    seconds = time.monotonic() - started
    candidates = [run(seed) for seed in range(1, seeds + 1)]
    fixed, fixed_again = run(None), run(None)
    wrong = [
        {"question": question.text, "answer": question.answer, "completion": text}
        for question, text in zip(questions, reference.texts, strict=True)
        if final_answer(text) != question.answer
    ]
    total = len(questions)
    counts = margin_histogram(reference.margins)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "batch": batch,
        "prompts": total,
        "seeds": seeds,
        "accuracy": 1 - len(wrong) / total,
        "unfinished": sum(row[-1] != tokenizer.eos_token_id for row in reference.tokens),
        "mean_new_tokens": sum(map(len, reference.tokens)) / total,
        "seconds_per_run": seconds,
        **compare(reference, candidates, questions, lambda token: repr(tokenizer.decode([token]))),
        "fixed_order_repeats_that_differ": sum(
            one != other for one, other in zip(fixed.tokens, fixed_again.tokens, strict=True)
        ),
        "margin_edges": list(MARGIN_EDGES),
        "margin_counts": counts,
        "tie_rate": counts[0] / sum(counts),
        "wrong": wrong[:8],
        "examples": reference.texts[:5],
    }


def main() -> None:
    """Measure a folder from the command line; prints JSON."""
    parser = argparse.ArgumentParser(description="Accuracy, margins and simulated divergence.")
    parser.add_argument("folder", type=Path, help="holds model/, adapter/, prompts.jsonl")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument(
        "--problem-seed", type=int, help="draw other held-out problems instead of prompts.jsonl"
    )
    parser.add_argument("--seeds", type=int, default=3, help="schedules compared with the first")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.problem_seed is None:
        lines = (options.folder / "prompts.jsonl").read_text().splitlines()[: options.prompts]
        rows = [json.loads(line) for line in lines]
        questions = [Question(row["prompt"], row["answer"]) for row in rows]
    else:
        problems = held_out_problems(options.problem_seed, options.prompts)
        questions = [Question(problem.question, problem.answer) for problem in problems]
    result = measure(
        options.folder / "model",
        options.folder / "adapter",
        questions,
        device=options.device,
        batch=options.batch,
        seeds=options.seeds,
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
