"""Every option that takes a number refuses one that means nothing, before a model is loaded or a folder is made."""

from __future__ import annotations

import inspect
import re

import pytest

from fliptrace.command_line.running import run
from fliptrace.command_line.trace_check import trace_check
from fliptrace.command_line.trace_pair import trace_pair
from fliptrace.command_line.trace_study import COMMANDS
from fliptrace_interventions.command_line.fragility import fragility
from fliptrace_interventions.command_line.trace_intervene import trace_intervene

FUNCTIONS = {
    "trace-check": trace_check,
    "trace-pair": trace_pair,
    "trace-intervene": trace_intervene,
    **{f"trace-study {name}": study for name, study in COMMANDS.items()},
    "trace-study fragility": fragility,
}
#: What each command is given besides: it ends at a folder that is not there or cannot be made.
OTHERS = {
    "trace-check": "--model {root}/no --adapter {root}/no",
    "trace-pair": "--model {root}/no --adapter {root}/no --prompt x --out {root}/out",
    "trace-intervene": "{root}/no",
    "trace-study decide": "--csv {root}/rows.csv --out {root}/rows.csv/out",
    "trace-study train": "--task csv:{root}/no --out {root}/out",
}
OF_A_STUDY = "--out {root}/rows.csv/out"
#: Judged by what the pair holds, once it is open.
OF_THE_PAIR = {"trace-intervene --step", "trace-intervene --continue-to"}
MAY_BE_ENDLESS = {"trace-study fragility --reach"}
MAY_BE_NEGATIVE = {"trace-study --threshold"}
MAY_BE_ZERO = {
    "trace-pair --seed",
    "trace-intervene --shams",
    "trace-intervene --seed",
    "trace-study --seed",
    "trace-study --prompt-seed",
    "trace-study --threshold",
    "trace-study --budget-minutes",
    "trace-study batch --alone",
    "trace-study batch --locate",
    "trace-study train --test-rows",
    "trace-study fragility --replays",
    "trace-study fragility --executions",
    "trace-study fragility --reach",
    "trace-study fragility --observed",
}


def bad_numbers():
    """Yield (command, option, number) for every option that takes a number."""
    for command, function in FUNCTIONS.items():
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind = re.search(r"\b(int|float)\b", str(parameter.annotation).partition(", <")[0])
            option = f"--{parameter.name.replace('_', '-')}"
            names = {f"{command} {option}", f"{command.split()[0]} {option}"}
            if kind is None or names & OF_THE_PAIR:
                continue
            fractions = kind[1] == "float"
            refused = {
                "-1": not names & MAY_BE_NEGATIVE,
                "0": not names & MAY_BE_ZERO,
                "nan": fractions,
                "inf": fractions and not names & MAY_BE_ENDLESS,
            }
            yield from ((command, option, number) for number, bad in refused.items() if bad)


@pytest.fixture
def line_of(tmp_path, capsys):
    """Type a command; the one line on stderr, after which nothing new is there."""
    (tmp_path / "rows.csv").write_text("text,label\na,yes\nb,no\n", "utf-8")

    def typed(command, *more):
        words = OTHERS.get(command, OF_A_STUDY).format(root=tmp_path).split()
        with pytest.raises(SystemExit) as stopped:
            run(FUNCTIONS[command], command, [*words, *more])
        shown = capsys.readouterr()
        assert (stopped.value.code, shown.out) == (2, "")
        assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
        (line,) = shown.err.splitlines()
        return line

    return typed


def ends_elsewhere(line):
    """Tell whether a line is about a folder or file, or what nobody thought of."""
    return "cannot be" in line or "/no" in line or "report it" in line


@pytest.mark.parametrize(("command", "option", "number"), list(bad_numbers()))
def test_a_number_that_means_nothing_is_refused(line_of, command, option, number):
    """The line says what came, and nothing of what the command would have met next."""
    line = line_of(command, f"{option}={number}")
    assert re.search(rf"got .*(?<![\d.]){number}\b", line), line
    assert not ends_elsewhere(line), line


@pytest.mark.parametrize("command", FUNCTIONS)
def test_without_one_the_command_goes_on(line_of, command):
    """Were a number taken, the line would be another one."""
    assert ends_elsewhere(line_of(command))
