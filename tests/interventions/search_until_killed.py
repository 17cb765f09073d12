"""Fork processes that investigate a pair with one journal, kill each at a random moment, and let the last one finish.

    python search_until_killed.py MODEL ADAPTER REFERENCE CANDIDATE JOURNAL OUT SHAMS RUNS KILLS

Prints what became of each: killed, or ended before.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from fliptrace.pair import diff_traces, load_engine
from fliptrace_interventions.budget import Budget
from fliptrace_interventions.journal import Journal
from fliptrace_interventions.searches.investigation import investigate
from fliptrace_interventions.workbench import Workbench

LINES_AT_MOST = 12


def search(engine, traces, journal, out, shams, runs):
    with diff_traces(*traces) as pair, Journal(journal) as kept:
        bench = Workbench(pair, engine, shams=shams)
        found = investigate(bench, journal=kept, budget=Budget(runs=runs))
    out.write_text(json.dumps(found.to_json()), "utf-8")


def forked(*arguments):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            search(*arguments)
            code = 0
        finally:
            os._exit(code)
    return child


def lines_of(journal):
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def kill_somewhere(child, journal):
    """Kill once some more lines are there, at a random moment after the last one; it may have ended by then."""
    last = lines_of(journal) + random.randint(1, LINES_AT_MOST)
    while lines_of(journal) < last:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return "ended"
        time.sleep(0.002)
    time.sleep(random.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return "killed" if os.WIFSIGNALED(status) else "ended"


def main(model, adapter, reference, candidate, journal, out, shams, runs, kills):
    torch.set_num_threads(1)
    engine = load_engine(model, adapter, device="cpu")
    journal, out = Path(journal), Path(out)
    work = (engine, (reference, candidate), journal, out, int(shams), int(runs))
    for _ in range(int(kills)):
        sys.stdout.write(f"{kill_somewhere(forked(*work), journal)}\n")
    with journal.open("ab") as file:
        file.write(b'0123456789abcdef ["torn')
    search(*work)


if __name__ == "__main__":
    main(*sys.argv[1:])
