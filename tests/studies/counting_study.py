"""A study without a model, to test the frame; run as a script it is the process that tests kill."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from fliptrace.studies.items import Item
from fliptrace.studies.running import run_study
from fliptrace.studies.study import Column, Report, Table

COLUMNS = (
    Column("item", "string", "name"),
    Column("key", "string", "digest"),
    Column("square", "float", "of the number, a third more"),
    Column("digits", "ints", "of the number"),
)


@dataclass(frozen=True)
class CountingStudy:
    """Squares numbers, slowly if wanted."""

    numbers: int = 12
    pause: float = 0.0
    offset: float = 0.1
    adapter: str = "a"

    name = "count"

    def identity(self):
        return {"study": self.name, "offset": self.offset}

    def items(self):
        return [Item(f"number {number}", {"number": number}) for number in range(self.numbers)]

    def open(self):
        return CountingWorker(self)

    def report(self, rows):
        return Report(
            title="Numbers <b>squared</b>",
            lines=[f"sum {sum(row['square'] for row in rows)!r}"],
            summary={"study": self.name},
            tables=(Table("rows", COLUMNS, rows),),
        )


class CountingWorker:
    """Squares."""

    def __init__(self, study):
        self.study = study

    def describe(self):
        return {
            "model": {"name": "m", "sha256": "1"},
            "adapter": {"name": "a", "sha256": self.study.adapter},
        }

    def run(self, item):
        time.sleep(self.study.pause)
        number = item.arguments["number"]
        return {
            "square": (number + self.study.offset) ** 2 / 3,
            "digits": [int(digit) for digit in str(number)],
        }


if __name__ == "__main__":
    run_study(CountingStudy(numbers=60, pause=0.03), sys.argv[1])
