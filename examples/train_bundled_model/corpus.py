"""Turn generated word problems into token arrays, and train the tokenizer on them.

Work is cut into chunks of `CHUNK` documents. Each chunk has its own seed, so the corpus does not
depend on how many processes make it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from solutions import Wording, adapter_solution, base_solution
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from word_problems import Problem, make_problem

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHUNK = 2000

# A word or a digit takes the space before it along; digits stay single.
_SPLIT = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token rows, right-padded with 0.

    Attributes:
        tokens: uint16 `[documents, width]`.
        prompt_lengths: uint16 `[documents]`; the loss starts after the prompt.
        dropped: documents that were longer than `width` and left out.
    """

    tokens: npt.NDArray[np.uint16]
    prompt_lengths: npt.NDArray[np.uint16]
    dropped: int


def prompt_text(question: str) -> str:
    """What the chat template renders for one user message."""
    return f"{USER}{question}{END}{ASSISTANT}"


def solution(style: str, problem: Problem, rng: Random, wording: Wording) -> str:
    """A solution in the style "base" or "adapter"."""
    write = base_solution if style == "base" else adapter_solution
    return write(problem, rng, wording)


def training_problems(rng: Random, count: int) -> Iterator[Problem]:
    """Draw `count` problems that are not held out."""
    made = 0
    while made < count:
        problem = make_problem(rng)
        if not problem.held_out:
            made += 1
            yield problem


def held_out_problems(seed: int, count: int) -> list[Problem]:
    """The first `count` different held-out problems drawn from `seed`."""
    rng = Random(f"held-out/{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = make_problem(rng)
        if problem.held_out:
            found.setdefault(problem.question, problem)
    return list(found.values())


def train_tokenizer(seed: int, vocabulary: int, documents: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on questions and on solutions in both styles."""
    rng = Random(f"tokenizer/{seed}")
    texts = []
    for index, problem in enumerate(training_problems(rng, documents)):
        style = ("base", "adapter")[index % 2]
        texts.append(f"{problem.question}\n{solution(style, problem, rng, Wording())}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def _encode_chunk(
    task: tuple[str, int, int, int, int, str, Wording],
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16], int]:
    tokenizer_file, seed, chunk, count, width, style, wording = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_file)
    rng = Random(f"{style}/{seed}/{chunk}")
    prompts, texts = [], []
    for problem in training_problems(rng, count):
        prompts.append(prompt_text(problem.question))
        texts.append(f"{prompts[-1]}{solution(style, problem, rng, wording)}{END}")
    rows = np.zeros((count, width), dtype=np.uint16)
    lengths = np.zeros(count, dtype=np.uint16)
    kept = 0
    for prompt, text in zip(
        tokenizer.encode_batch_fast(prompts), tokenizer.encode_batch_fast(texts), strict=True
    ):
        if len(text.ids) <= width:
            rows[kept, : len(text.ids)] = text.ids
            lengths[kept] = len(prompt.ids)
            kept += 1
    return rows[:kept], lengths[:kept], count - kept


def build_corpus(
    tokenizer_file: Path,
    *,
    seed: int,
    documents: int,
    width: int,
    style: str,
    wording: Wording,
    processes: int,
) -> Corpus:
    """Generate and tokenise `documents` training documents in the style "base" or "adapter"."""
    tasks = [
        (str(tokenizer_file), seed, chunk, min(CHUNK, documents - start), width, style, wording)
        for chunk, start in enumerate(range(0, documents, CHUNK))
    ]
    if processes <= 1:
        parts = [_encode_chunk(task) for task in tasks]
    else:
        # Forked workers start at once; spawned ones would import torch again.
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        with multiprocessing.get_context(method).Pool(processes) as pool:
            parts = pool.map(_encode_chunk, tasks, chunksize=1)
    return Corpus(
        tokens=np.concatenate([rows for rows, _, _ in parts]),
        prompt_lengths=np.concatenate([lengths for _, lengths, _ in parts]),
        dropped=sum(dropped for _, _, dropped in parts),
    )
