"""trace-pair --demo: a first result in a minute or two, without a download or a GPU.

The bundled model runs on the CPU; arrival orders of atomics are simulated from schedule seeds, searched within a stated
budget. 16-bit matrix products differ between processors, so a seed that flips a token on one may not on another; when
none does within the budget, a recorded pair that ships is opened instead, and said to be one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fliptrace.command_line.output import Output, show_document, show_summary, write_pictures
from fliptrace.command_line.running import exit_code, progress_bar
from fliptrace.verdicts import LEVELS

if TYPE_CHECKING:
    from fliptrace.pair import Pair, PairSettings

#: Rows of the bundled prompts that the demonstration asks, in this order: they flipped where the model was measured.
DEMO_ROWS = (36, 31, 54, 1, 65, 52)


def run_demo(settings: PairSettings, output: Output, fail_on: str) -> int:
    """Find a pair that flips, or open the recorded one; write it; return the exit code."""
    from fliptrace.pair import load_pair
    from fliptrace.pair.bundled import bundled_model

    bundled = bundled_model()
    settings = dataclasses.replace(settings, max_new_tokens=min(settings.max_new_tokens, 160))
    budget = settings.attempts * len(DEMO_ROWS)
    output.say(
        f"Demonstration: the bundled model on the CPU, reduction {settings.reduction} with simulated arrival orders; "
        f"at most {budget} candidates over {len(DEMO_ROWS)} prompts."
    )
    pair, executions = _search(settings, output)
    if pair is None:
        output.say(
            f"No schedule seed flipped a token in {executions} executions on this processor. "
            "What follows is a recorded pair that ships with the package, compared now."
        )
        pair = load_pair(bundled.recorded_pair)
    else:
        output.say(f"Found after {executions} executions.")
    with pair:
        page = pair.save(output.folder, command=output.command)
        write_pictures(pair, output.folder, output.figures)
        if output.as_json:
            show_document(pair.to_json(output.command))
        else:
            show_summary(pair)
            output.say(f"\nThe report is {page}")
        return exit_code(pair.diff.outcome, fail_on)


def _search(settings: PairSettings, output: Output) -> tuple[Pair | None, int]:
    """Ask the demonstration's prompts until a token flips; return the pair, if any, and how many executions ran."""
    import torch

    from fliptrace.pair import encode_prompt, load_engine, trace_pair
    from fliptrace.pair.bundled import bundled_model

    bundled = bundled_model()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is small: more threads only wait for each other
    executions = 0
    try:
        with progress_bar(output.quiet) as show:
            engine = load_engine(bundled.model, bundled.adapter, device="cpu")
            for row in DEMO_ROWS:
                source = f"bundled prompt {row}"
                prompt = encode_prompt(engine.tokenizer, bundled.prompts[row].text, source=source)

                def tell(what: str, done: int, total: int, source: str = source) -> None:
                    show(f"{source}: {what}", done, total)

                pair = trace_pair(engine, prompt=prompt, settings=settings, progress=tell)
                executions += 1 + (pair.attempts or 0)
                if pair.diff.outcome in LEVELS[settings.until]:
                    return pair, executions
                pair.close()
    finally:
        torch.set_num_threads(threads)
    return None, executions
