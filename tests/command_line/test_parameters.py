"""Groups of options: a command takes a dataclass, a person sees its fields as options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from fliptrace.command_line.parameters import with_groups


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A group; one of its options must be given."""

    file: Annotated[Path, typer.Option("--weights", help="The file.")]
    layers: Annotated[int, typer.Option(help="How many.")] = 2


@dataclass(frozen=True, kw_only=True)
class MoreWeights(Weights):
    """A group that adds to another."""

    name: Annotated[list[str] | None, typer.Option(help="Repeat it.")] = None


def application(seen):
    """Return a command line that keeps what its command was called with."""

    @with_groups
    def show(
        *, weights: MoreWeights, count: Annotated[int, typer.Option(help="Of runs.")] = 1
    ) -> int:
        """Show weights."""
        seen.append((weights, count))
        return 0

    found = typer.Typer()
    found.command()(show)
    return found


def test_options_of_a_group_reach_it():
    """Typed or left out, renamed and repeated, beside options of the command's own."""
    seen = []
    words = ["--weights", "a.bin", "--name", "x", "--name", "y", "--count", "3"]
    result = CliRunner().invoke(application(seen), words)
    assert result.exit_code == 0, result.output
    assert seen == [(MoreWeights(file=Path("a.bin"), layers=2, name=["x", "y"]), 3)]


@pytest.mark.parametrize("words", [[], ["--weights", "a", "--layers", "two"]])
def test_what_a_group_asks_for_is_checked(words):
    """A missing option and a wrong type are usage errors; the command does not run."""
    seen = []
    assert CliRunner().invoke(application(seen), words).exit_code == 2
    assert seen == []


def test_help_shows_every_option_of_the_group():
    """In the order of the signature."""
    shown = CliRunner().invoke(application([]), ["--help"]).output
    places = [shown.index(name) for name in ("--weights", "--layers", "--name", "--count")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["batch", "latency"])
def test_what_is_left_out_is_said_in_the_help(name):
    """Studies that share an option have their own defaults of it; each says them in its own words, and truly."""
    import importlib

    from fliptrace.command_line.trace_study import COMMANDS

    study = importlib.import_module(f"fliptrace.studies.{name}")
    fields = getattr(study, f"{name.title()}Study").__dataclass_fields__
    switches, sizes = fields["switches"].default, [str(n) for n in fields["batch_sizes"].default]
    told = " ".join(COMMANDS[name].__doc__.split())
    assert f"without --batch-invariant: {' and '.join(switches)};" in told
    assert f"without --batch-size: {', '.join(sizes[:-1])} and {sizes[-1]}." in told
    assert f"Without --reduction: {', '.join(study.REDUCTIONS[:1])}" in told
