"""Train the small model that ships with fliptrace: a Llama base and a rank-16 LoRA adapter.

One command makes everything, on any CUDA machine (and, with --smoke, in seconds on a CPU):

    python examples/train_bundled_model/train.py --out bundled

Stages, in order (choose some with --stages):

    data      train the tokenizer; generate and tokenise the base and the adapter corpus
    base      train the base model from scratch
    adapter   train the LoRA on the other corpus, whose solutions have another style
    polish    train it a little more, on solutions without sums in parentheses
    evaluate  measure accuracy, margins and divergence under the simulated schedule

The output folder receives `model/`, `adapter/`, `prompts.jsonl` and `metrics.json`. To run single
stages, give --work, a folder that keeps the tokenizer and the corpora. All random choices derive
from --seed, but training on a GPU does not repeat bit by bit, so another run gives another model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import measure_model
import numpy as np
import torch
import transformers
from corpus import Corpus, build_corpus, held_out_problems, train_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from recipe import FULL, PROJECTIONS, SMOKE, Phase, Recipe
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

STAGES = ("data", "base", "adapter", "polish", "evaluate")


def batches(corpus: Corpus, size: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches for ever.

    Yields:
        ids int64 `[size, width]` and labels int64 `[size, width]`, -100 outside the solution.
    """
    tokens = torch.from_numpy(corpus.tokens.astype(np.int16)).to(device)
    prompts = torch.from_numpy(corpus.prompt_lengths.astype(np.int64)).to(device)
    columns = torch.arange(tokens.shape[1], device=device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(tokens), generator=generator).to(device)
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            ids = tokens[rows].long()
            outside = (columns < prompts[rows, None]) | (ids == 0)
            yield ids, ids.masked_fill(outside, -100)


def solution_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over solution tokens, in FP32."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def fit(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: list[tuple[str, nn.Parameter]],
    data: Iterator[tuple[Tensor, Tensor]],
    phase: Phase,
    device: str,
    name: str,
) -> dict[str, float]:
    """Run one phase with AdamW; returns steps done, seconds and the last mean loss."""
    # Norms are not decayed, nor is the embedding: rows of tokens that the corpus never shows would
    # shrink together.
    groups = [
        {"params": [p for name, p in parameters if p.ndim == 2 and "embed" not in name]},
        {
            "params": [p for name, p in parameters if p.ndim != 2 or "embed" in name],
            "weight_decay": 0.0,
        },
    ]
    everything = [p for _, p in parameters]
    optimizer = torch.optim.AdamW(
        groups,
        lr=phase.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=phase.weight_decay,
        fused=device == "cuda",
    )
    recent = torch.zeros((), device=device)
    start = time.monotonic()
    step = 0
    while step < phase.steps:
        slope = min((step + 1) / phase.warmup, 1.0) * (1.0 - step / phase.steps)
        for group in optimizer.param_groups:
            group["lr"] = phase.learning_rate * slope
        ids, labels = next(data)
        # On a CPU, FP32 is faster.
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = torch.lerp(loss.detach().float(), recent, 0.98 if step else 0.0)
        step += 1
        if step == 1:
            start = time.monotonic()  # the first step also compiles
        if step % 100 == 0 or step == 1:
            spent_seconds = time.monotonic() - start
            print(f"{name} step {step} loss {recent:.4f} {spent_seconds:.0f} s", flush=True)
    return {"steps": step, "seconds": time.monotonic() - start, "loss": recent.item()}


def save_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer under the class name that every transformers release knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_data(recipe: Recipe, work: Path, processes: int) -> None:
    """Stage `data`: the tokenizer and both corpora."""
    tokenizer = train_tokenizer(recipe.seed, recipe.vocabulary, recipe.tokenizer_documents)
    save_tokenizer(tokenizer, work / "tokenizer")
    for style, phase in (("base", recipe.base), ("adapter", recipe.adapter)):
        corpus = build_corpus(
            work / "tokenizer" / "tokenizer.json",
            seed=recipe.seed,
            documents=phase.documents,
            width=phase.width,
            style=style,
            wording=phase.wording,
            processes=processes,
        )
        np.savez(work / f"{style}.npz", tokens=corpus.tokens, prompts=corpus.prompt_lengths)
        tokens = int((corpus.tokens > 0).sum())
        print(
            f"{style} corpus: {len(corpus.tokens)} documents, {tokens} tokens, "
            f"{corpus.dropped} too long and dropped",
            flush=True,
        )


def load_corpus(work: Path, style: str) -> Corpus:
    """Read back what `make_data` wrote."""
    with np.load(work / f"{style}.npz") as arrays:
        return Corpus(arrays["tokens"], arrays["prompts"], 0)


def train_base(
    recipe: Recipe, work: Path, out: Path, device: str, compiled: bool
) -> dict[str, float]:
    """Stage `base`: train from scratch, save in BF16."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(device)

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        return solution_loss(model, ids, labels)

    result = fit(
        torch.compile(loss_of) if compiled else loss_of,
        list(model.named_parameters()),
        batches(load_corpus(work, "base"), recipe.base.batch, recipe.seed, device),
        recipe.base,
        device,
        "base",
    )
    model.to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(out / "model")
    save_tokenizer(tokenizer, out / "model")
    return result


def load_base(out: Path, device: str) -> LlamaForCausalLM:
    """The saved base, frozen under the adapter: BF16 on a GPU, its values in FP32 on a CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM.from_pretrained(out / "model", dtype=dtype).to(device)


def fit_adapter(
    model: PeftModel,
    corpus: Corpus,
    phase: Phase,
    seed: int,
    out: Path,
    *,
    name: str,
    device: str,
    compiled: bool,
) -> dict[str, float]:
    """Train the LoRA weights of `model` and save them in BF16."""

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        if not compiled:  # shapes may change, so padding can be cut off
            used = int((ids > 0).any(0).sum())
            ids, labels = ids[:, :used], labels[:, :used]
        return solution_loss(model, ids, labels)

    result = fit(
        torch.compile(loss_of) if compiled else loss_of,
        [(name, p) for name, p in model.named_parameters() if p.requires_grad],
        batches(corpus, phase.batch, seed, device),
        phase,
        device,
        name,
    )
    model.to(torch.bfloat16)
    model.save_pretrained(str(out / "adapter"))
    (out / "adapter" / "README.md").unlink(missing_ok=True)
    path = out / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = "fliptrace/bundled/model"
    config["target_modules"] = list(PROJECTIONS)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return result


def train_adapter(
    recipe: Recipe, work: Path, out: Path, device: str, compiled: bool
) -> dict[str, float]:
    """Stage `adapter`: train a new LoRA on the saved base."""
    torch.manual_seed(recipe.seed + 1)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=0.0,
        target_modules=list(PROJECTIONS),
        task_type="CAUSAL_LM",
    )
    return fit_adapter(
        get_peft_model(load_base(out, device), config),
        load_corpus(work, "adapter"),
        recipe.adapter,
        recipe.seed + 1,
        out,
        name="adapter",
        device=device,
        compiled=compiled,
    )


def polish_adapter(recipe: Recipe, out: Path, device: str, processes: int) -> dict[str, float]:
    """Stage `polish`: train the saved LoRA further on a small corpus of its own."""
    corpus = build_corpus(
        out / "model" / "tokenizer.json",
        seed=recipe.seed + 1,
        documents=recipe.polish.documents,
        width=recipe.polish.width,
        style="adapter",
        wording=recipe.polish.wording,
        processes=processes,
    )
    return fit_adapter(
        PeftModel.from_pretrained(load_base(out, device), out / "adapter", is_trainable=True),
        corpus,
        recipe.polish,
        recipe.seed + 2,
        out,
        name="polish",
        device=device,
        compiled=False,
    )


def write_prompts(recipe: Recipe, out: Path) -> None:
    """The first held-out problems, unselected, one JSON object a line."""
    with (out / "prompts.jsonl").open("w") as lines:
        for problem in held_out_problems(recipe.seed, recipe.prompts):
            row = {"prompt": problem.question, "answer": problem.answer}
            lines.write(json.dumps(row) + "\n")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the model")
    parser.add_argument("--work", type=Path, help="folder for corpora (default: OUT/work)")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated stages")
    parser.add_argument("--smoke", action="store_true", help="a tiny run that only shows it works")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="default: the recipe's")
    parser.add_argument("--eval-prompts", type=int, default=400)
    parser.add_argument("--eval-seeds", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Run the stages."""
    options = arguments()
    recipe = SMOKE if options.smoke else FULL
    if options.seed is not None:
        recipe = replace(recipe, seed=options.seed)
    stages = options.stages.split(",")
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        raise SystemExit(f"train.py: no such stage: {', '.join(unknown)}; known: {STAGES}")
    out: Path = options.out
    work: Path = options.work or out / "work"
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    device: str = options.device
    compiled = device == "cuda" and not options.no_compile
    processes = 1 if options.smoke else options.processes
    metrics_path = out / "metrics.json"
    metrics = json.loads(metrics_path.read_text()) if metrics_path.exists() else {}
    metrics["recipe"] = asdict(recipe)
    metrics["machine"] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for stage in STAGES:
        if stage not in stages:
            continue
        started = time.monotonic()
        if stage == "data":
            make_data(recipe, work, processes)
        elif stage == "base":
            metrics["base"] = train_base(recipe, work, out, device, compiled)
        elif stage == "adapter":
            metrics["adapter"] = train_adapter(recipe, work, out, device, compiled)
        elif stage == "polish":
            metrics["polish"] = polish_adapter(recipe, out, device, processes)
        else:
            write_prompts(recipe, out)
            asked = recipe.prompts if options.smoke else options.eval_prompts
            metrics["evaluation"] = measure_model.measure(
                out / "model",
                out / "adapter",
                [
                    measure_model.Question(problem.question, problem.answer)
                    for problem in held_out_problems(recipe.seed, asked)
                ],
                device=device,
                batch=asked,
                seeds=options.eval_seeds,
                max_new_tokens=8 if options.smoke else 120,
            )
        print(f"stage {stage}: {time.monotonic() - started:.0f} s", flush=True)
        metrics_path.write_text(json.dumps(metrics, indent=1) + "\n")
    if options.work is None and set(stages) == set(STAGES):
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
