"""Short arithmetic word problems, made at random.

With `solutions.py` this is the only data source of the bundled model. It uses no third-party text,
only the standard library, and every random choice comes from the `random.Random` that the caller
passes. Not here: how solutions are worded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HELD_OUT_PER_MILLE = 5
"""Questions whose CRC-32 modulo 1000 is below this are never trained on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One arithmetic operation of a solution.

    `follows` says which operand is the result of the step before: "left", "right" or "" (neither).
    `labels` are interchangeable noun phrases for the result, without an article.
    """

    left: int
    operator: str
    right: int
    result: int
    labels: tuple[str, ...]
    unit: str
    follows: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with the steps that solve it; the last step's result is the answer."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """The number asked for."""
        return self.steps[-1].result

    @property
    def held_out(self) -> bool:
        """Whether this question belongs to the held-out set (decided by its text alone)."""
        return zlib.crc32(self.question.encode()) % 1000 < HELD_OUT_PER_MILLE


_NAMES: tuple[tuple[str, str], ...] = tuple(
    (name, "She") for name in "Anna Bella Clara Dina Emma Fiona Grace Hanna Iris Julia Kate".split()
) + tuple(
    (name, "He") for name in "Adam Ben Carl David Eric Frank George Henry Ivan Jack Leo".split()
)
_ITEMS = (
    "apples books cards coins cookies eggs flowers marbles oranges pencils shells stamps stickers "
    "stones toys"
).split()
_GOODS = "pens cups hats lamps plates shirts bags balls caps maps".split()


def _step(left: int, operator: str, right: int, labels: str, unit: str, follows: str = "") -> Step:
    """Build a step; `labels` is one string with the noun phrases separated by "|"."""
    if operator == "+":
        result = left + right
    elif operator == "-":
        result = left - right
    elif operator == "*":
        result = left * right
    else:
        result = left // right
    return Step(left, operator, right, result, tuple(labels.split("|")), unit, follows)


def _people(rng: Random, count: int) -> list[tuple[str, str]]:
    return rng.sample(_NAMES, count)


def _divisors(value: int, low: int = 2, high: int = 9) -> list[int]:
    return [k for k in range(low, high + 1) if value % k == 0 and value // k > 1]


def _collection(rng: Random) -> Problem:
    (name, pronoun), (friend, _) = _people(rng, 2)
    items = rng.choice(_ITEMS)
    value = rng.randint(5, 60)
    text = [rng.choice((f"{name} has {value} {items}.", f"{name} starts with {value} {items}."))]
    steps: list[Step] = []
    for index in range(rng.randint(2, 4)):
        follows = "left" if index else ""
        kind = rng.choice("++---*")
        if kind == "*" and value <= 120:
            factor = rng.randint(2, 3)
            verb = {2: "doubles", 3: "triples"}[factor]
            text.append(f"Then {name} {verb} this number.")
            labels = "new number|larger number"
            step = _step(value, "*", factor, labels, items, follows)
        elif kind == "-" and value > 4:
            amount = rng.randint(2, value - 2)
            text.append(
                rng.choice(
                    (
                        f"{pronoun} gives {amount} to {friend}.",
                        f"{pronoun} loses {amount} of them.",
                        f"{pronoun} sells {amount} of them.",
                    )
                )
            )
            step = _step(value, "-", amount, "number left|rest|remaining number", items, follows)
        else:
            amount = rng.randint(2, 60)
            text.append(
                rng.choice(
                    (
                        f"{pronoun} buys {amount} more.",
                        f"{pronoun} finds another {amount}.",
                        f"{friend} brings {amount} more.",
                    )
                )
            )
            step = _step(value, "+", amount, "new total|sum|new number", items, follows)
        steps.append(step)
        value = step.result
    ways = _divisors(value)
    if ways and rng.random() < 0.5:
        friends = rng.choice(ways)
        text.append(f"{pronoun} shares them equally among {friends} friends.")
        text.append(f"How many {items} does each friend get?")
        steps.append(_step(value, "/", friends, "share|part of each friend", items, "left"))
    else:
        text.append(
            rng.choice(
                (
                    f"How many {items} does {name} have now?",
                    f"How many {items} are there in the end?",
                )
            )
        )
    return Problem(" ".join(text), tuple(steps))


def _shop(rng: Random) -> Problem:
    ((name, pronoun),) = _people(rng, 1)
    first, second = rng.sample(_GOODS, 2)
    n1, n2 = rng.randint(2, 9), rng.randint(2, 9)
    p1, p2 = rng.randint(2, 12), rng.randint(2, 12)
    steps = [
        _step(n1, "*", p1, f"cost of the {first}|price of the {first}", "dollars"),
        _step(n2, "*", p2, f"cost of the {second}|price of the {second}", "dollars"),
    ]
    total = _step(steps[0].result, "+", steps[1].result, "total cost|bill|sum", "dollars", "right")
    steps.append(total)
    text = [
        rng.choice(
            (
                (
                    f"{name} buys {n1} {first} for {p1} dollars each and "
                    f"{n2} {second} for {p2} dollars each."
                ),
                (
                    f"In a shop, {first} cost {p1} dollars each and {second} cost {p2} dollars each. "
                    f"{name} takes {n1} {first} and {n2} {second}."
                ),
            )
        )
    ]
    if rng.random() < 0.5:
        paid = (total.result // 10 + rng.randint(1, 5)) * 10
        text.append(f"{pronoun} pays with {paid} dollars. How much change does {name} get?")
        steps.append(_step(paid, "-", total.result, "change|money back", "dollars", "right"))
    else:
        text.append(f"How many dollars does {name} pay in total?")
    return Problem(" ".join(text), tuple(steps))


def _work(rng: Random) -> Problem:
    ((name, pronoun),) = _people(rng, 1)
    hours, days, rate = rng.randint(2, 8), rng.randint(2, 6), rng.randint(5, 15)
    worked = _step(hours, "*", days, "number of hours|working time", "hours")
    pay = _step(worked.result, "*", rate, "pay|money earned|wage", "dollars", "left")
    text = [
        rng.choice(
            (
                (
                    f"{name} works {hours} hours a day for {days} days "
                    f"and earns {rate} dollars an hour."
                ),
                (
                    f"{name} earns {rate} dollars an hour "
                    f"and works {hours} hours on each of {days} days."
                ),
            )
        )
    ]
    steps = [worked, pay]
    if rng.random() < 0.5:
        spent = rng.randint(5, pay.result - 2)
        text.append(f"{pronoun} spends {spent} dollars. How much money is left?")
        steps.append(_step(pay.result, "-", spent, "money left|rest", "dollars", "left"))
    else:
        saved = rng.randint(5, 99)
        text.append(f"{pronoun} already has {saved} dollars. How much money does {name} have now?")
        steps.append(_step(pay.result, "+", saved, "total|sum|money in all", "dollars", "left"))
    return Problem(" ".join(text), tuple(steps))


def _boxes(rng: Random) -> Problem:
    (name, _), (friend, _) = _people(rng, 2)
    items = rng.choice(_ITEMS)
    boxes, each = rng.randint(3, 12), rng.randint(4, 15)
    packed = _step(boxes, "*", each, "number packed|number in the boxes", items)
    text = [
        rng.choice(
            (
                f"{name} packs {boxes} boxes with {each} {items} in each box.",
                f"There are {boxes} boxes on a table, and each holds {each} {items}.",
            )
        )
    ]
    if rng.random() < 0.5:
        amount = rng.randint(2, packed.result - 4)
        text.append(f"{friend} takes {amount} {items} away.")
        second = _step(packed.result, "-", amount, "number left|rest", items, "left")
    else:
        amount = rng.randint(2, 60)
        text.append(f"{friend} adds {amount} loose {items}.")
        second = _step(packed.result, "+", amount, "new total|sum", items, "left")
    steps = [packed, second]
    ways = _divisors(second.result)
    if ways and rng.random() < 0.7:
        shelves = rng.choice(ways)
        text.append(f"All {items} go on {shelves} shelves, the same number on each.")
        text.append(f"How many {items} are on one shelf?")
        steps.append(_step(second.result, "/", shelves, "number on a shelf|share", items, "left"))
    else:
        text.append(f"How many {items} are there now?")
    return Problem(" ".join(text), tuple(steps))


def _compare(rng: Random) -> Problem:
    (name, _), (friend, _), (third, _) = _people(rng, 3)
    items = rng.choice(_ITEMS)
    start = rng.randint(4, 40)
    if rng.random() < 0.5:
        more = rng.randint(2, 40)
        relation = f"{friend} has {more} more than {name}."
        second = _step(start, "+", more, f"number for {friend}|amount for {friend}", items)
    else:
        factor = rng.randint(2, 5)
        relation = f"{friend} has {factor} times as many as {name}."
        second = _step(start, "*", factor, f"number for {friend}|amount for {friend}", items)
    text = [f"{name} has {start} {items}.", relation]
    steps = [second]
    if rng.random() < 0.5:
        total = _step(start, "+", second.result, "number for both|sum|total", items, "right")
        steps.append(total)
        less = rng.randint(2, total.result - 2)
        text.append(f"{third} has {less} fewer than both of them together.")
        text.append(f"How many {items} does {third} have?")
        labels = f"number for {third}|amount for {third}"
        steps.append(_step(total.result, "-", less, labels, items, "left"))
    else:
        less = rng.randint(2, second.result - 2)
        labels = f"number for {third}|amount for {third}"
        last = _step(second.result, "-", less, labels, items, "left")
        steps.append(last)
        text.append(f"{third} has {less} fewer than {friend}.")
        text.append(f"How many {items} do {friend} and {third} have together?")
        steps.append(
            _step(second.result, "+", last.result, "number for both|sum|total", items, "right")
        )
    return Problem(" ".join(text), tuple(steps))


def _reading(rng: Random) -> Problem:
    ((name, pronoun),) = _people(rng, 1)
    daily, days = rng.randint(5, 30), rng.randint(2, 9)
    read = _step(daily, "*", days, "number of pages read|part read", "pages")
    finish, pace = rng.randint(2, 9), rng.randint(3, 25)
    if rng.random() < 0.6:
        pages = read.result + finish * pace
        goal = f"{pronoun} wants to read the rest in {finish} days. How many pages a day is that?"
        left = _step(pages, "-", read.result, "number of pages left|rest", "pages", "right")
        steps = [read, left, _step(left.result, "/", finish, "daily number|pace", "pages", "left")]
    else:
        pages = read.result + rng.randint(5, 99)
        extra = rng.randint(2, pages - read.result - 2)
        goal = f"Then {name} reads {extra} more pages. How many pages are left?"
        total = _step(read.result, "+", extra, "number of pages read|part read", "pages", "left")
        last = _step(pages, "-", total.result, "number of pages left|rest", "pages", "right")
        steps = [read, total, last]
    text = f"A book has {pages} pages. {name} reads {daily} pages a day for {days} days. {goal}"
    return Problem(text, tuple(steps))


def _age(rng: Random) -> Problem:
    (name, _), (friend, _), (third, _) = _people(rng, 3)
    age, factor = rng.randint(4, 20), rng.randint(2, 4)
    second = _step(age, "*", factor, f"age of {friend}", "years")
    text = [f"{name} is {age} years old. {friend} is {factor} times as old as {name}."]
    years = rng.randint(2, 25)
    if rng.random() < 0.5:
        text.append(f"{third} is {years} years older than {friend}.")
        last = _step(second.result, "+", years, f"age of {third}", "years", "left")
    else:
        years = rng.randint(1, second.result - 2)
        text.append(f"{third} is {years} years younger than {friend}.")
        last = _step(second.result, "-", years, f"age of {third}", "years", "left")
    steps = [second, last]
    if rng.random() < 0.5:
        later = rng.randint(2, 20)
        text.append(f"How old will {third} be in {later} years?")
        steps.append(_step(last.result, "+", later, "later age|age then", "years", "left"))
    else:
        text.append(f"How old are {name} and {third} together?")
        steps.append(_step(age, "+", last.result, "sum of the ages|sum|total", "years", "right"))
    return Problem(" ".join(text), tuple(steps))


def _trip(rng: Random) -> Problem:
    ((name, _),) = _people(rng, 1)
    v1, v2 = rng.randint(10, 60), rng.randint(10, 60)
    h1, h2 = rng.randint(2, 6), rng.randint(2, 6)
    first = _step(v1, "*", h1, "first part|first distance", "miles")
    second = _step(v2, "*", h2, "second part|second distance", "miles")
    total = _step(first.result, "+", second.result, "total|sum|whole way", "miles", "right")
    text = [
        f"{name} drives {v1} miles an hour for {h1} hours and {v2} miles an hour for {h2} hours."
    ]
    steps = [first, second, total]
    if rng.random() < 0.5:
        goal = total.result + rng.randint(5, 200)
        text.append(f"The trip is {goal} miles long. How many miles are left?")
        steps.append(_step(goal, "-", total.result, "distance left|rest", "miles", "right"))
    else:
        text.append("How many miles is that in all?")
    return Problem(" ".join(text), tuple(steps))


def _bus(rng: Random) -> Problem:
    people = rng.randint(8, 50)
    text = [rng.choice((f"A bus starts with {people} people.", f"{people} people are on a bus."))]
    steps: list[Step] = []
    for stop in ("first", "second")[: rng.randint(1, 2)]:
        on, off = rng.randint(2, 30), rng.randint(2, people - 2)
        text.append(f"At the {stop} stop {off} get off and {on} get on.")
        labels = "number left|rest"
        steps.append(_step(people, "-", off, labels, "people", "left" if steps else ""))
        steps.append(_step(people - off, "+", on, "new number|sum", "people", "left"))
        people = steps[-1].result
    text.append("How many people are on the bus now?")
    return Problem(" ".join(text), tuple(steps))


def _baking(rng: Random) -> Problem:
    ((name, pronoun),) = _people(rng, 1)
    cakes, cups = rng.randint(3, 12), rng.randint(2, 9)
    spare = rng.randint(2, 30)
    needed = _step(cakes, "*", cups, "need for the cakes|flour for the cakes", "cups")
    both = _step(needed.result, "+", spare, "whole need|sum|total", "cups", "left")
    text = [
        (
            f"{name} bakes {cakes} cakes. Each needs {cups} cups of flour. {pronoun} also needs "
            f"{spare} cups for bread."
        )
    ]
    steps = [needed, both]
    have = rng.randint(2, both.result - 2)
    text.append(f"{pronoun} has {have} cups. How many more cups does {name} need?")
    steps.append(_step(both.result, "-", have, "missing part|flour to buy", "cups", "left"))
    return Problem(" ".join(text), tuple(steps))


STORIES: tuple[Callable[[Random], Problem], ...] = (
    _collection, _shop, _work, _boxes, _compare, _reading, _age, _trip, _bus, _baking,
)  # fmt: skip


def make_problem(rng: Random) -> Problem:
    """Draw one problem, training or held out."""
    return rng.choice(STORIES)(rng)
