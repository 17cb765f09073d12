"""One vLLM engine in a process of its own, with or without the live recorder; started by vllm_live.py.

    python examples/measure/vllm_live_engine.py '{"options": {"model": ...}, "adapters": [...], "record": {...}}'

It answers commands as vllm_engine.py does; `record` holds the arguments of `prepare_watch`, or is null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fliptrace.studies import engine_process_vllm as inside

RECORDED: dict[str, Any] = {}
"""Executions by name, and the recorder that holds the latest."""


def main() -> None:
    """Start the engine, say so, and answer until there are no more commands."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = time.perf_counter()
    try:
        if settings.get("record") is not None:
            import fliptrace as ft

            ft.prepare_watch(**settings["record"])
        facts, llm, adapters = inside.start(settings)
        facts |= describe_recorder() if settings.get("record") is not None else {}
    except Exception as error:
        inside.say(answers, {"error": inside.said(error)})
        raise
    inside.say(answers, {"ready": round(time.perf_counter() - started, 1), **facts})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = DO[command["do"]](llm, adapters, command)
        except Exception as error:  # noqa: BLE001  (told to whoever asked)
            import traceback

            traceback.print_exc()
            answer = {"error": inside.said(error)}
        inside.say(answers, answer)


def describe_recorder() -> dict[str, Any]:
    """Tell what vLLM's warm-up left: which sizes are captured, and how they are recorded."""
    from fliptrace.capture.vllm_engine.live.watching import prepared_writer

    writer = prepared_writer()
    if writer is None or writer.ring is None:
        return {"recorder": "no layer has run yet"}
    return {
        "recorder": {
            "layers": len(writer.keys),
            "row_bytes": writer.ring.layout.starts[-1] * 4,
            "operand_row_bytes": writer.ring.layout.operand_starts[-1] * 8,
            "ring_bytes": writer.ring.bytes,
            "recorded_at_the_end": sorted(writer.at_end),
            "captured": writer.captured,
        }
    }


def generate(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Continue prompts and time it; under a recorder if the command says watch."""
    if not command.get("watch"):
        return inside.generate(llm, adapters, command)
    import fliptrace as ft

    begin = time.perf_counter()
    with ft.watch(llm) as recorder:
        answer = inside.generate(llm, adapters, command)
    answer["seconds_with_begin_and_end"] = time.perf_counter() - begin
    if name := command.get("name"):
        executions = recorder.executions()
        RECORDED["recorder"] = recorder
        RECORDED[name] = executions
        answer |= {
            "coverage": recorder.coverage(),
            "records": sum(int(execution.observed.sum()) for execution in executions),
            "expected": sum(e.expected * len(e.recording.layers) for e in executions),
            "tokens_agree": [list(e.token_ids) for e in executions] == answer["tokens"],
        }
    return answer


def hashes(_llm: Any, _adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Name every record of the requests of one recording: per row and site, the operand and the FP32 bits."""
    return {"requests": [hashes_of(execution) for execution in RECORDED[command["name"]]]}


def short(digests: Any) -> list[str]:
    """Write the first 32 bits of each row's digest."""
    return [f"{lane & 0xFFFFFFFF:08x}" for lane in digests[:, 0].tolist()]


def hashes_of(execution: Any) -> dict[str, Any]:
    """Name the records of each row, by site in the order of their paths."""
    from fliptrace.numerics import digest_rows

    places = sorted(
        (site.path, number, part)
        for number, layer in enumerate(execution.recording.layers)
        for part, site in layer.sites
    )
    digests = execution.operand_digests()
    columns = [
        list(
            zip(
                short(digests[:, number]),
                short(digest_rows(execution.shrink(number)[:, part].contiguous())),
                strict=True,
            )
        )
        for _, number, part in places
    ]
    return {
        "rows": list(zip(*columns, strict=True)),
        "rows_of_forward": execution.rows[:, 3].tolist(),
        "tokens": list(execution.token_ids),
        "missing": execution.missing(),
    }


def eager(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Run one request alone through the engine that shows every shrink to Python, and name its records likewise."""
    import fliptrace as ft
    from fliptrace.numerics import digest_rows

    seen: dict[int, tuple[list[str], list[str]]] = {}

    def keep(site: int, operand: Any, z: Any) -> Any:
        seen[site] = short(digest_rows(operand)), short(digest_rows(z))
        return z

    found, tokens = [], []
    with ft.attach(llm, adapters[0], reduction="vllm-own") as engine:
        order = sorted(range(len(engine.sites)), key=lambda site: engine.sites[site].path)
        engine.start(tuple(command["prompt"]))
        token = None
        with engine.intercepted(keep):
            for _ in range(command["tokens"]):
                seen.clear()
                token = int(engine.step(token).float().argmax())
                tokens.append(token)
                columns = [list(zip(*seen[site], strict=True)) for site in order]
                found += list(zip(*columns, strict=True))
    return {"rows": found, "tokens": tokens}


def recompute(_llm: Any, _adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Run the reduction again, alone and eagerly, on the operands in the ring, and compare with the recorded rows."""
    from fliptrace.capture.vllm_engine.live.layout import row_numbers
    from fliptrace.numerics import digest_rows
    from fliptrace_kernels import lora_shrink

    recorder, executions = RECORDED["recorder"], RECORDED[command["name"]]
    ring, layout = recorder.ring, recorder.ring.layout
    counts: Counter[str] = Counter()
    groups: dict[int, list[tuple[Any, int]]] = {}
    for execution in executions:
        for row, forward in enumerate(execution.forwards.tolist()):
            groups.setdefault(forward, []).append((execution, row))
    chosen = sorted(groups)
    chosen = chosen[:2] + chosen[2 :: max(1, len(chosen) // command["forwards"])]
    capacity = ring.operands.shape[0]
    for forward in chosen:
        execution, row = groups[forward][0]
        rows = int(execution.rows[row, 3])
        base = int(row_numbers(execution.rows[row : row + 1])[0]) - int(execution.places[row])
        if rows > capacity:
            counts["forwards without operands"] += 1
            continue
        slots = (base + torch.arange(rows)) % capacity
        for layer in range(len(layout.layers)):
            start, words = layout.operand_starts[layer], layout.words(layer)
            block = ring.operands[slots.to(ring.operands.device), start : start + words]
            x = block.contiguous().view(layout.dtype)
            digests = digest_rows(x).cpu()
            weights = [a.to(x.device) for a in recorder.weights(layer, execution, row)]
            z = None
            if command["reduction"]:
                z = lora_shrink(x, weights, reduction=command["reduction"]).cpu()
            for other, place_row in groups[forward]:
                place = int(other.places[place_row])
                recorded = layout.digests(other.rows[place_row : place_row + 1])[0, layer]
                if not torch.equal(digests[place], recorded):
                    counts["operands that differ or were overwritten"] += 1
                    continue
                counts["operands equal"] += 1
                if z is not None:
                    kept = layout.shrinks(other.rows[place_row : place_row + 1], layer)[0]
                    same = torch.equal(
                        kept.contiguous().view(torch.int32),
                        z[:, place].contiguous().view(torch.int32),
                    )
                    counts["shrinks equal" if same else "shrinks differ"] += 1
    return {"forwards": len(chosen), "counts": dict(counts)}


def hunt(llm: Any, adapters: list[Any], command: dict[str, Any]) -> dict[str, Any]:
    """Repeat concurrent requests until tokens change; name the roots and export reproducers."""
    import fliptrace as ft

    command = command | {"watch": True}
    end = time.monotonic() + command["limit"]
    for _ in range(command.get("warm", 0)):  # fills vLLM's prefix cache
        inside.generate(llm, adapters, command)
    generate(llm, adapters, command | {"name": "reference"})
    reference = RECORDED["reference"]
    verdicts: Counter[str] = Counter()
    flips, exported, comparisons, steps = [], [], 0, []
    repeats = 0
    while repeats < command["repeats"] and time.monotonic() < end:
        repeats += 1
        with ft.watch(llm) as recorder:
            inside.generate(llm, adapters, command)
        for one, other in zip(reference, recorder.executions(), strict=True):
            comparisons += 1
            if one.token_ids == other.token_ids and len(flips) >= command["flips"]:
                continue
            found = ft.compare_executions(one, other)
            key = "flip" if found.flip is not None else "same tokens"
            verdicts[f"{key}: {found.word}"] += 1
            if found.flip is None:
                continue
            if len(flips) < command["flips"]:
                flips.append({"repeat": repeats, **found.describe()})
            if found.first is not None:
                steps.append(found.flip - found.first.step)
            if str(found.verdict) == "root":
                decoding = found.first is not None and found.first.step > 0
                verdicts[f"root in {'decoding' if decoding else 'a prefill'}"] += 1
            if str(found.verdict) == "root" and len(exported) < command["exports"]:
                folder = Path(command["out"]) / f"reproducer-{len(exported) + 1}"
                exported.append(str(recorder.export_reproducer(found, folder)))
        if len(flips) >= command["flips"] and len(exported) >= command["exports"]:
            break
    return {
        "repeats": repeats,
        "comparisons": comparisons,
        "verdicts": dict(verdicts),
        "flips": flips,
        "exported": exported,
        "steps_from_root_to_flip": steps,
        "coverage": recorder.coverage() if repeats else (),
    }


DO: dict[str, Callable[..., dict[str, Any]]] = {
    "chat": inside.chat,
    "eager": eager,
    "generate": generate,
    "hashes": hashes,
    "hunt": hunt,
    "recompute": recompute,
}

if __name__ == "__main__":
    main()
