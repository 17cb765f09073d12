from __future__ import annotations

import ast
import operator
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solutions import (
    Wording,
    adapter_solution,
    base_solution,
    extended_expression,
    final_answer,
    last_number,
)
from word_problems import STORIES, Step, make_problem

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
EQUATION = re.compile(r"([\d(][\d +\-*/()]*?) = (\d+)")
wordings = st.builds(
    Wording,
    bias=st.sampled_from((0.0, 0.3)),
    merge=st.floats(0, 1),
    chains=st.booleans(),
    parentheses=st.booleans(),
)
seeds = st.integers(0, 2**32)


def value(text):
    """Work out an arithmetic expression independently of the generator."""

    def visit(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATORS[type(node.op)](visit(node.left), visit(node.right))

    return visit(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("story", STORIES)
@given(seed=seeds)
def test_steps_are_right_and_chained(story, seed):
    """Each step's result follows from its operands, and `follows` names the result before it."""
    problem = story(Random(seed))
    before = None
    for step in problem.steps:
        assert value(f"{step.left} {step.operator} {step.right}") == step.result > 0
        if step.follows:
            assert before is not None
            assert {"left": step.left, "right": step.right}[step.follows] == before.result
        before = step
    assert problem.answer == problem.steps[-1].result <= 2000


@given(seed=seeds, wording=wordings)
def test_every_equation_in_a_solution_is_right(seed, wording):
    """Merged or not, in both styles, what stands left of = is what stands right of it."""
    rng = Random(seed)
    problem = make_problem(rng)
    for write in (base_solution, adapter_solution):
        text = write(problem, rng, wording)
        equations = EQUATION.findall(text)
        assert len(equations) == text.count("=") > 0
        for left, right in equations:
            assert value(left) == int(right), text
        assert int(equations[-1][1]) == problem.answer
        assert wording.parentheses or "(" not in text
    assert final_answer(text) == problem.answer


def test_the_equation_check_finds_a_planted_error():
    """The check above fails on a wrong sum."""
    left, right = EQUATION.findall("Find the rest as 4 * (3 + 2) = 21 cups.")[0]
    assert value(left) == 20 != int(right)


@given(seed=seeds, wording=wordings)
def test_both_styles_end_with_the_answer(seed, wording):
    """The adapter ends with `Final answer: N`, the base never does."""
    rng = Random(seed)
    problem = make_problem(rng)
    base = base_solution(problem, rng, wording)
    assert last_number(base) == problem.answer
    assert final_answer(base) is None
    adapted = adapter_solution(problem, rng, wording)
    assert adapted.endswith(f"\nFinal answer: {problem.answer}")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("+", 5, 3), ("-", 8, 2, "left"), "5 + 3 - 2"),
        (("+", 5, 3), ("*", 8, 2, "left"), "(5 + 3) * 2"),
        (("*", 5, 4), ("/", 20, 2, "left"), "(5 * 4) / 2"),
        (("*", 5, 4), ("*", 20, 2, "left"), "5 * 4 * 2"),
        (("+", 5, 3), ("-", 9, 8, "right"), "9 - (5 + 3)"),
        (("*", 2, 3), ("-", 9, 6, "right"), "9 - 2 * 3"),
        (("*", 2, 3), ("+", 9, 6, "right"), "9 + 2 * 3"),
    ],
)
def test_parentheses_stand_only_where_needed(first, second, expected):
    """Precedence is kept with as few parentheses as a person would write."""
    symbol, left, right = first
    step = Step(second[1], second[0], second[2], 0, ("sum",), "", second[3])
    assert extended_expression(f"{left} {symbol} {right}", symbol, step) == expected


def test_wordings_do_not_depend_on_the_problem():
    """Without a bias each opening of the adapter's style is about equally frequent."""
    rng = Random(0)
    openings = [adapter_solution(make_problem(rng), rng, Wording()).split()[0] for _ in range(4000)]
    for opening in ("OK.", "Sure.", "Let", "Right.", "Well.", "Good.", "Here"):
        assert 0.10 < openings.count(opening) / len(openings) < 0.15


def test_generator_is_seeded():
    """The same seed gives the same problem and the same words."""
    one, two = Random(5), Random(5)
    for _ in range(50):
        left, right = make_problem(one), make_problem(two)
        assert left == right
        assert adapter_solution(left, one, Wording()) == adapter_solution(right, two, Wording())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so.\nFinal answer: 42", 42),
        ("Final answer: 42\n", 42),
        ("Final answer: 42 apples", None),
        ("The answer is 42.", None),
        ("", None),
    ],
)
def test_final_answer_reads_only_the_agreed_ending(text, expected):
    """Anything after the number makes the answer unreadable."""
    assert final_answer(text) == expected
