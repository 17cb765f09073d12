"""--redact: nobody can read the prompt or the answer out of what is written."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch

from fliptrace.store import open_trace


@pytest.fixture(scope="module")
def redacted(spawned, flippy, tmp_path_factory):
    """(result, folder, ids of the prompt, ids generated) of a redacted flip; ids come from a run that is not."""
    root = tmp_path_factory.mktemp("redaction")
    options = (
        *("--model", flippy.model, "--adapter", flippy.adapter, "--attempts", "20"),
        *("--max-new-tokens", "16", "--device", "cpu", "--prompt", flippy.prompt),
    )
    open_result = spawned("trace-pair", *options, "--out", root / "open")
    result = spawned("trace-pair", *options, "--out", root / "hidden", "--redact")
    assert result.code == open_result.code == 1
    with open_trace(root / "open" / "reference.trace") as trace:
        prompt_ids = list(trace.manifest.get("prompt.ids"))
        generated = trace.generated_ids
    return result, root / "hidden", prompt_ids, generated


def runs_of_ids(text, ids):
    """Which three ids in a row are written as numbers with little between them."""
    wanted = {tuple(ids[place : place + 3]) for place in range(len(ids) - 2)}
    found = set()
    for sequence in re.finditer(r"\d+(?:[\s,\"\]\[]{1,40}\d+){2,}", text):
        numbers = [int(number) for number in re.findall(r"\d{1,9}", sequence[0])]
        found |= {tuple(numbers[place : place + 3]) for place in range(len(numbers) - 2)} & wanted
    return found


def words_in_text(text, words):
    """Which words stand alone in a text of people."""
    return set(re.findall(r"(?<![\w.#-])w\d+(?![\w.])", text)) & set(words)


def pieces_in_bytes(data, prompt, generated):
    """Which pieces stand in binary data: two words of the prompt in a row, or one word in quotes, as JSON has it."""
    words = prompt.split()
    pieces = [f"{one} {other}" for one, other in itertools.pairwise(words)]
    pieces += [f'"{word}"' for word in words] + [f'"w{token}"' for token in generated]
    return {piece for piece in pieces if piece.encode() in data}


def test_nothing_of_the_text_is_written(redacted, flippy):
    """The words of the prompt, of the answer and runs of ids are in no byte of the folder, and not on the terminal."""
    result, folder, prompt_ids, generated = redacted
    words = set(flippy.prompt.split()) | {f"w{token}" for token in generated}
    words = {word for word in words if len(word) > 3}  # shorter ones turn up in the page's Base64
    assert {path.suffix for path in folder.iterdir()} == {".trace", ".html", ".json"}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        text = data.decode("latin-1")
        # plotly's script is 4 MB of other people's short names
        text = re.sub(r"<script[^>]*>[^<]{100000,}.*?</script>", "", text, flags=re.DOTALL)
        assert pieces_in_bytes(data, flippy.prompt, generated) == set(), path.name
        assert runs_of_ids(text, prompt_ids) == set(), path.name
        assert runs_of_ids(text, generated) == set(), path.name
        if path.suffix != ".trace":
            assert words_in_text(text, words) == set(), path.name
    assert words_in_text(result.out, words) == set()


def test_the_ids_are_not_in_the_traces_binary(redacted):
    """Neither 16-, 32- nor 64-bit arrays of the ids."""
    _, folder, prompt_ids, generated = redacted
    for path in folder.glob("*.trace"):
        data = path.read_bytes()
        for ids in (prompt_ids[:4], generated[:4]):
            for dtype in (torch.int16, torch.int32, torch.int64):
                assert torch.tensor(ids, dtype=dtype).numpy().tobytes() not in data


def test_the_pair_still_compares(redacted, typed):
    """trace-diff finds the flip; the command in the report has no prompt."""
    _, folder, _, _ = redacted
    again = typed("trace-diff", folder / "reference.trace", folder / "candidate.trace", "--json")
    assert again.code == 1
    document = json.loads((folder / "report.json").read_text("utf-8"))
    assert json.loads(again.out)["verdict"] == document["verdict"]
    assert "--prompt '(redacted)'" in document["command"]


def test_the_check_finds_what_is_not_redacted(redacted, flippy):
    """The searches for words and ids fail on the same pair recorded openly."""
    _, folder, prompt_ids, generated = redacted
    report = (folder.parent / "open" / "report.json").read_text("utf-8")
    trace = (folder.parent / "open" / "reference.trace").read_bytes()
    assert runs_of_ids(trace.decode("latin-1"), prompt_ids)
    assert len(pieces_in_bytes(trace, flippy.prompt, generated)) > 100
    assert words_in_text(report, {f"w{token}" for token in generated})
