"""A stand-in for the Python that has vLLM: it answers an engine's commands by arithmetic, so that what comes is known.

Outputs are the prompt's sum counted on. With the switch off, the last token of a prompt in a batch of four or more is
another; under atomic the last token changes with every request, of a text its first logit and its decision, too. It
breaks what the environment's PLANTED names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

settings = json.loads(sys.argv[-1])
label = os.environ.get("FLIPTRACE_SHRINK", "vllm-own")
invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
planted = os.environ.get("PLANTED", "")
asked = 0
cache: set[tuple[int, ...]] = set()


def say(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def answer(command):
    global asked  # noqa: PLW0603  (a script's own count)
    do = command["do"]
    if do == "chat":
        texts = enumerate(command["texts"])
        return {"prompts": [[10 + number, len(text) % 7, 5] for number, text in texts]}
    if do == "describe":
        said = "unsplit/64" if planted == "another kernel" else label
        worker = {"rank": 0, "reduction": said, "kernel": f"kernel of {said}"}
        if label != "vllm-own":
            worker |= {"installed": True, "layers": 3, "launches": asked}
        return {
            "model": {"name": "stand-in", "sha256": "m", "dtype": "bfloat16"},
            "adapter": {"name": "adapter", "sha256": "a", "scaling_sha256": "s"},
            "engine": {"name": "vllm", "batch_invariant": invariant, "vocabulary": 100},
            "environment": {"versions": {"torch": "0"}, "variables": {}},
            "workers": [worker],
        }
    if do == "forget_prefixes":
        cache.clear()
        return {}
    if do == "locate":
        one = {"module": None, "kind": None, "step": None, "operations": None}
        one |= {"same_tokens": True, "calls": 7}
        leak = {"module": "layers.1.norm", "kind": "RMSNorm", "step": 0, "operations": ["op"]}
        return {
            "requests": [
                {"request": number, **one, **(leak if number == 1 else {})}
                for number in range(command["alone"])
            ]
        }
    if planted == "slow":
        time.sleep(0.05)
    asked += 1
    varies = label.startswith("atomic") or (planted == "varies" and label.startswith("local"))
    if planted == "fails" and asked > 3:
        raise RuntimeError("planted failure")
    if do == "continue_texts":
        return {"answers": [continued(text, command, varies) for text in command["texts"]]}
    if do == "decide_texts":
        drift = 0.001 * asked if varies else 0.0
        return {
            "answers": [
                {
                    "prompt_ids_sha256": hashlib.sha256(text.encode()).hexdigest(),
                    "prompt_tokens": len(text),
                    "log_yes": -1.0 - drift,
                    "log_no": -2.0,
                }
                for text in command["texts"]
            ]
        }
    size = command["batch"] if "batch" in command else len(command["prompts"])
    tokens, cached = [], []
    for prompt in command["prompts"]:
        ids = [sum(prompt) + step for step in range(command["tokens"])]
        if size >= 4 and not invariant:
            ids[-1] += 1000
        if varies:
            ids[-1] += 10_000 * asked
        tokens.append(ids)
        warm = tuple(prompt) in cache and not command.get("skip_prefix_cache")
        cached.append(2 if warm else 0)
        cache.add(tuple(prompt))
    if do == "generate":
        return {"seconds": 1.0, "tokens": tokens, "cached_tokens": cached}
    factor = {"unsplit/64": 2.0, "vllm-own": 1.0}.get(label, 1.5)
    factor *= 1.0 if settings["adapters"] else 0.5
    times = [[factor * (0.1 + 0.01 * step) for step in range(command["tokens"])]] * len(tokens)
    return {
        "seconds": [times[0][-1]] * (len(tokens) // size),
        "times": times,
        "tokens": tokens,
    }


def continued(text, command, varies):
    """Tokens count on from the text's length; the first logit and the last token vary where the label does."""
    ids = [len(text) + step for step in range(command["tokens"])]
    logits = [float(token) for token in ids]
    if varies:
        ids[-1] += 10_000 * asked
        logits[0] += asked / 8
    scored = settings["options"].get("logprobs_mode") == "raw_logits" and planted != "no scores"
    return {
        "prompt_ids_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "prompt_tokens": len(text),
        "token_ids": ids,
        "selected_logits": logits if scored else None,
        "margins": [0.0, *([0.5] * (len(ids) - 1))] if scored else None,
        "stop_reason": "max new tokens",
        # Who was together, and on which GPU.
        "text": f"{len(command['texts'])} at once on {os.environ.get('CUDA_VISIBLE_DEVICES')}",
    }


if planted == "without vLLM":
    say({"error": "ModuleNotFoundError: No module named 'vllm'"})
    sys.exit(1)
if planted == "does not start":
    say({"error": "PluginError: planted"})
    sys.exit(1)
say({"ready": 0.1, "vllm": "0", "torch": "0", "gpu": "a GPU", "mode": "graphs"})
for line in sys.stdin:
    try:
        said = answer(json.loads(line))
    except RuntimeError as error:
        said = {"error": str(error)}
    say(said)
