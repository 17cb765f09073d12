"""A journal gives back what was written, however the writing ended."""

from __future__ import annotations

import pytest

from fliptrace.errors import InputError
from fliptrace_interventions.journal import Entry, Journal, _checksum, content_key

ENTRY = Entry("screen", {"token": 5, "text": "né\n", "values": [1.5, None, -0.0]}, 1, 9, 0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "search.jsonl"


def filled(path, count):
    with Journal(path) as journal:
        for number in range(count):
            journal.put(
                content_key({"edit": number}), Entry("screen", {"token": number}, 1, 2, 0.0)
            )
    return path.read_bytes()


def test_entries_come_back(path):
    """What one process wrote another reads, equal."""
    key = content_key({"edit": [1, 2], "recipient": "reference"})
    with Journal(path) as journal:
        assert journal.get(key) is None
        assert journal.put(key, ENTRY) == ENTRY
    with Journal(path) as journal:
        assert journal.get(key) == ENTRY
        assert (len(journal), journal.unreadable_lines) == (1, 0)


def test_any_change_of_the_question_is_another_question():
    """Order of keys is no content; everything else is."""
    question = {"traces": ["x", "y"], "reduction": "unsplit/64", "edits": [{"bits": "0x3f800000"}]}
    assert content_key(question) == content_key(dict(reversed(question.items())))
    for name, other in (
        ("traces", ["y", "x"]),
        ("reduction", "unsplit/32"),
        ("edits", [{"bits": "0x3f800001"}]),
    ):
        assert content_key(question | {name: other}) != content_key(question)


def test_a_torn_last_line_costs_its_own_run_only(path):
    """Cut anywhere in the last line: all others are kept, and what is written next is whole."""
    data = filled(path, 3)
    start = data.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start, len(data) - 1):
        path.write_bytes(data[:end])
        with Journal(path) as journal:
            assert len(journal) == 2
            assert journal.unreadable_lines == int(end > start)
            journal.put(content_key({"edit": 9}), ENTRY)
        with Journal(path) as journal:
            assert len(journal) == 3
            assert journal.get(content_key({"edit": 9})) == ENTRY


def test_a_cut_before_the_last_line_end_loses_nothing(path):
    """Only the line end is missing: the line is whole."""
    path.write_bytes(filled(path, 3)[:-1])
    with Journal(path) as journal:
        assert (len(journal), journal.unreadable_lines) == (3, 0)


def test_a_damaged_line_is_no_answer(path):
    """One flipped bit anywhere in a line makes it unreadable, never another answer."""
    data = filled(path, 1)
    for place in range(len(data) - 1):
        for bit in (1, 64):
            damaged = bytearray(data)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            with Journal(path) as journal:
                assert len(journal) == 0


def test_two_searches_do_not_share_a_journal(path):
    """The second one is refused while the first one runs, and may have it afterwards."""
    with Journal(path), pytest.raises(InputError, match="in use by another search"):
        Journal(path)
    Journal(path).close()


def test_what_is_forgotten_is_gone_from_the_file(path):
    """A journal that is emptied keeps its lock and its file, and takes new runs."""
    with Journal(path) as journal:
        journal.put(content_key({"edit": 0}), ENTRY)
        journal.forget()
        assert len(journal) == 0
        with pytest.raises(InputError):
            Journal(path)
        journal.put(content_key({"edit": 1}), ENTRY)
    with Journal(path) as again:
        assert (len(again), again.unreadable_lines) == (1, 0)


def test_a_line_of_another_shape_is_no_answer(path):
    """A whole line with a right checksum that holds something else is read as damaged."""
    content = b'["key", "screen"]'
    path.write_bytes(_checksum(content).encode() + b" " + content + b"\n")
    with Journal(path) as journal:
        assert (len(journal), journal.unreadable_lines) == (0, 1)


def test_a_folder_is_no_journal(tmp_path):
    """The message says what to name instead."""
    with pytest.raises(InputError, match="name a file in it"):
        Journal(tmp_path)


def test_a_journal_in_memory_keeps_nothing_behind():
    """Without a path it only spares the same run twice."""
    journal = Journal()
    journal.put("key", ENTRY)
    assert journal.get("key") == ENTRY
    journal.close()
