"""What engines in processes of their own are asked about texts: continuations with their scores, and decisions.

Called inside the process, by engine_process_vllm, which makes the sampling parameters. Prompts are encoded and answers
decoded as the engines that fliptrace steps do it, so that rows of both can be compared.
"""

from __future__ import annotations

from typing import Any, Protocol

from fliptrace.errors import InputError
from fliptrace.pair.prompts import encode_prompt
from fliptrace.studies.engines import ids_sha256
from fliptrace.studies.labelled import label_tokens


class Sampling(Protocol):
    """Makes vLLM's greedy sampling parameters."""

    def __call__(self, command: dict[str, Any], **more: Any) -> Any:
        """Return them, as a command asks for them, with more arguments of SamplingParams."""
        ...


def encoded(llm: Any, command: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the token ids of a command's texts, as the engines that fliptrace steps encode them.

    Raises:
        InputError: a prompt is empty, or leaves no room for a token.
    """
    tokenizer = llm.get_tokenizer()
    limit = llm.llm_engine.vllm_config.model_config.max_model_len
    found = []
    for text, source in zip(command["texts"], command["sources"], strict=True):
        ids = encode_prompt(tokenizer, text, chat_template=command["template"], source=source).ids
        if len(ids) >= limit:
            raise InputError(
                f"the prompt ({source}) has {len(ids)} tokens and the engine's longest request {limit}; leave it out"
            )
        found.append(ids)
    return found


def answered(llm: Any, adapters: list[Any], prompts: list[tuple[int, ...]], parameters: Any) -> Any:
    """Return what vLLM's LLM.generate returns for prompts that run at once, under the first adapter."""
    return llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts],
        parameters,
        lora_request=[adapters[0]] * len(prompts),
        use_tqdm=False,
    )


def continue_texts(
    sampling: Sampling, llm: Any, adapters: list[Any], command: dict[str, Any]
) -> dict[str, Any]:
    """Continue texts greedily, all at once, until their end tokens; tell each token's score and the margin.

    The command holds texts, sources (their names), template (apply the chat template), tokens (how many at most). The
    engine was made with logprobs_mode raw_logits: scores are the logits that the sampler got, as FP32.
    """
    prompts = encoded(llm, command)
    scored = llm.llm_engine.vllm_config.model_config.logprobs_mode == "raw_logits"
    parameters = sampling(command, **({"logprobs": 2} if scored else {}))
    answers = []
    for ids, output in zip(prompts, answered(llm, adapters, prompts, parameters), strict=True):
        made = output.outputs[0]
        token_ids = [int(token) for token in made.token_ids]
        selected, margins = None, None
        if scored:
            selected, margins = scores_of(token_ids, made.logprobs)
        full = "max new tokens" if len(token_ids) >= command["tokens"] else "context full"
        answers.append(
            {
                "prompt_ids_sha256": ids_sha256(ids),
                "prompt_tokens": len(ids),
                "token_ids": token_ids,
                "selected_logits": selected,
                "margins": margins,
                "stop_reason": "end of sequence" if made.finish_reason == "stop" else full,
                "text": llm.get_tokenizer().decode(token_ids, skip_special_tokens=True),
            }
        )
    return {"answers": answers}


def scores_of(token_ids: list[int], steps: Any) -> tuple[list[float], list[float]]:
    """Return, per step, the selected token's score and the largest score less the second."""
    selected, margins = [], []
    for token, scores in zip(token_ids, steps, strict=True):
        first, second = sorted((each.logprob for each in scores.values()), reverse=True)[:2]
        selected.append(float(scores[token].logprob))
        margins.append(float(first - second))
    return selected, margins


def decide_texts(
    sampling: Sampling, llm: Any, adapters: list[Any], command: dict[str, Any]
) -> dict[str, Any]:
    """Read the log-probabilities of two words as the next token of texts, all at once.

    The command holds texts, sources, template, and yes and no, the words; what vLLM's structured-decision interface
    asks of its engine for a yes/no question, too.

    Raises:
        InputError: a word encodes to nothing, or both begin with the same token.
    """
    yes, no = label_tokens(llm.get_tokenizer(), command["yes"], command["no"])
    prompts = encoded(llm, command)
    parameters = sampling({"tokens": 1, "ignore_eos": True}, logprob_token_ids=[yes, no])
    answers = []
    for ids, output in zip(prompts, answered(llm, adapters, prompts, parameters), strict=True):
        (scores,) = output.outputs[0].logprobs
        answers.append(
            {
                "prompt_ids_sha256": ids_sha256(ids),
                "prompt_tokens": len(ids),
                "log_yes": float(scores[yes].logprob),
                "log_no": float(scores[no].logprob),
            }
        )
    return {"answers": answers, "tokens": [yes, no]}
