"""Run something in many processes at once; compilers are slow and leave their work on the disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Final, TypeVar

Argument = TypeVar("Argument")

MOST_PROCESSES: Final = 16  # each holds a CUDA context of about half a gigabyte


@contextmanager
def in_processes(
    function: Callable[[Argument], str], arguments: Iterable[Argument]
) -> Iterator[list[str]]:
    """Start calls in other processes, let the caller work meanwhile, then wait for them.

    Args:
        function: importable; returns what went wrong, or an empty text.
        arguments: one call for each, the longest first.

    Yields:
        A list that holds, once the block is left, what went wrong.
    """
    waiting = list(arguments)
    problems: list[str] = []
    if not waiting:
        yield problems
        return
    count = min(len(waiting), os.cpu_count() or 1, MOST_PROCESSES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as executor:
        futures = [executor.submit(function, argument) for argument in waiting]
        yield problems
        for future in as_completed(futures):
            error = future.exception()
            text = repr(error) if error is not None else future.result()
            if text:
                problems.append(text)
