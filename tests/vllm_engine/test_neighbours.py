"""One request of a batch: its rows are told from its neighbours', and recorded and edited alone, on a real engine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fliptrace as ft
from fliptrace.command_line.options import EngineName
from fliptrace.command_line.trace_pair import trace_pair
from fliptrace.errors import FliptraceError, InputError, RecordingError, UnsupportedModelError
from fliptrace.pair.neighbours import read_neighbours, recorded_neighbours
from fliptrace.store import TraceReader, open_trace
from fliptrace.trace import Kind
from fliptrace_interventions import CacheEdit, ShrinkEdit, Workbench
from fliptrace_kernels import lora_shrink

#: A neighbour this long fills the bundled model's 512 positions in its sixth step, and begins again.
LONG = tuple(5 + number % 600 for number in range(506))
AGAIN = 6


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.fixture(scope="module")
def other_adapter(bundled, tmp_path_factory):
    """The bundled adapter, turned to another answer."""
    source, folder = Path(bundled.adapter), tmp_path_factory.mktemp("other") / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    weights = load_file(source / "adapter_model.safetensors")
    turned = {name: tensor * (-1 if "lora_B" in name else 1) for name, tensor in weights.items()}
    save_file(turned, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def loaded(bundled, other_adapter):
    """The bundled model with the traced request third of four; one neighbour has another adapter."""
    texts = [prompt.text for prompt in bundled.prompts[1:3]]
    neighbours = [LONG, ft.Neighbour(texts[0], other_adapter), None, texts[1]]
    engine = ft.load_engine(bundled.model, bundled.adapter, engine="vllm", neighbours=neighbours)
    yield engine
    engine.close()


@pytest.fixture
def batch(loaded):
    """The same, unsplit, before any prompt."""
    loaded.set_reduction("unsplit")
    yield loaded
    loaded._request.end()


@contextlib.contextmanager
def planted(engine, layer, row, column, *, step):
    """Change one element of what vLLM's own shrink gives in one row of a forward."""
    chosen, own = engine._layers[layer], engine._path.own_shrink

    def change(y, x, stacked, scale, **keywords):
        own(y, x, stacked, scale, **keywords)
        if stacked is chosen.module.lora_a_stacked and engine.runtime.step == step:
            y[chosen.slices[0].part][row(engine.runtime.batch), column] *= 1.5

    engine._path.own_shrink = change
    try:
        yield
    finally:
        engine._path.own_shrink = own


def run_on(engine, steps):
    for _ in range(steps):
        engine.step(5)


def record_many(engine, ids, record, folder, **settings):
    """Record by slots and by calls; the files."""
    paths = [folder / f"{by_calls}.trace" for by_calls in (False, True)]
    for path in paths:
        record(engine, ids, path, by_calls=path is paths[1], **settings)
    return paths


def frames_of(path, steps):
    with TraceReader(path) as trace:
        return [
            (step, kind, frame.layout, bytes(frame.payload))
            for step in range(steps)
            for kind, frame in trace.step_frames(step).items()
        ]


@pytest.mark.parametrize("reduction", ["vllm-own", "deterministic:8"])
def test_slots_hold_the_traced_rows_wherever_they_lie(batch, prompt, record, tmp_path, reduction):
    """Slots and calls give the same bytes over steps in which the row moves, as a neighbour begins again."""
    batch.set_reduction(reduction)
    steps = AGAIN + 3
    slots, calls = record_many(batch, prompt.ids, record, tmp_path, steps=steps)
    assert frames_of(slots, steps) == frames_of(calls, steps)
    with open_trace(slots) as trace:
        launches = [
            trace.frame(step, Kind.SHRINK).layout.entries[0].launch for step in range(steps)
        ]
        assert trace.steps[0].token_ids == prompt.ids
    places = [launch.split("batch_rows=")[1] for launch in launches]
    others = batch.loaded.neighbours.requests
    before = len(LONG) + len(others[1].prompt_ids)
    total = before + len(prompt.ids) + len(others[2].prompt_ids)
    assert places[0] == f"{total} first_row={before}"
    assert places[1] == "4 first_row=2"
    assert places[AGAIN] == f"{len(LONG) + 3} first_row={len(LONG) + 1}"
    assert places[AGAIN + 1] == "4 first_row=2"


def test_what_is_seen_is_the_traced_request(batch, prompt, other_adapter):
    """Ids, shrinks of its own adapter, projections, cache and logits: the prompt's, not a neighbour's."""
    seen, tokens, stored = {}, [], []

    class Seen:
        def __getattr__(self, name):
            return lambda *arguments: None

        def tokens_consumed(self, ids):
            tokens.append(ids.tolist())

        def needs_cached_rows(self, layer):
            return True

        def cache_consumed(self, layer, keys, values):
            stored.append((layer, keys.clone(), values.clone()))

    def keep(site, operand, z):
        seen[site] = (operand.clone(), z.clone())
        return z

    batch.start(prompt.ids)
    with batch.intercepted(keep), batch.audited(Seen()):
        for token in (None, 7):
            stored.clear()
            batch.step(token)
            for site, (operand, z) in seen.items():
                weight = batch.shrink_weight(site)
                assert operand.shape[0] == (len(prompt.ids) if token is None else 1)
                assert torch.equal(
                    bits(lora_shrink(operand, (weight,), reduction="unsplit")[0]), bits(z)
                )
    assert tokens == [list(prompt.ids), [7]]
    for layer, (number, keys, values) in zip(batch.read_cache(), stored, strict=True):
        assert layer.layer == number
        assert torch.equal(bits(layer.values[0].transpose(0, 1)), bits(keys))
        assert torch.equal(bits(layer.values[1].transpose(0, 1)), bits(values))
    mapping = batch.host.runner.lora_manager._adapter_manager._last_mapping.index_mapping
    assert len(mapping) == 4
    assert len(set(mapping)) == 2


def test_every_request_has_the_tokens_that_it_has_untraced(
    batch, prompt, generate, tmp_path, record
):
    """vLLM alone, the same four requests at once: the traced one and each neighbour choose the same tokens."""
    from vllm import SamplingParams

    hood, steps = batch.loaded.neighbours, AGAIN - 1
    batch.set_reduction("vllm-own")
    traced = record(batch, prompt.ids, tmp_path / "one.trace", steps=steps)
    beside = batch.neighbour_token_ids()
    batch._request.end()
    ids = [list(one.prompt_ids) for one in hood.requests]
    adapters = [one.lora_request for one in hood.requests]
    ids.insert(hood.place, list(prompt.ids))
    adapters.insert(hood.place, batch.loaded.lora_request)
    outputs = batch.loaded.llm.generate(
        [{"prompt_token_ids": one} for one in ids],
        SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True),
        lora_request=adapters,
        use_tqdm=False,
    )
    alone = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert alone.pop(hood.place) == traced
    # The last step's token is booked by the step after it.
    assert [tokens[: steps - 1] for tokens in beside] == [tokens[: steps - 1] for tokens in alone]
    assert len(set(beside)) == 3


def test_an_edit_reaches_the_traced_rows_alone(batch, prompt):
    """All shrinks of the traced request doubled: its logits change, its neighbours choose the same tokens."""
    found = {}
    for factor in (1.0, 2.0):
        batch.start(prompt.ids)
        with batch.intercepted(lambda site, operand, z, factor=factor: z * factor):
            rows = [batch.step(token) for token in (None, 7, 8, 9)]
        found[factor] = rows, batch.neighbour_token_ids()
    assert found[1.0][1] == found[2.0][1]
    assert all(len(tokens) == 3 for tokens in found[1.0][1])
    assert not torch.equal(bits(found[1.0][0][3]), bits(found[2.0][0][3]))


@pytest.fixture(scope="module")
def plain(loaded, prompt, record, tmp_path_factory):
    """A trace under vLLM's own shrink, with neighbours, of six steps."""
    loaded.set_reduction("vllm-own")
    path = tmp_path_factory.mktemp("plain") / "plain.trace"
    tokens = record(loaded, prompt.ids, path, steps=AGAIN)
    return path, tokens


def test_a_change_in_a_neighbours_row_is_not_reported(batch, prompt, plain, record, tmp_path):
    """Before and after the traced row, in the prompt's forward and in a later one: nothing differs."""
    batch.set_reduction("vllm-own")
    for step in (0, 3):
        for row in (lambda rows: rows.first - 1, lambda rows: rows.total - 1):
            path = tmp_path / "neighbour.trace"
            with planted(batch, 9, row, 2, step=step):
                record(batch, prompt.ids, path, steps=AGAIN, forced=plain[1])
            with ft.diff_traces(plain[0], path) as pair:
                assert str(pair.diff.outcome) == "identical"
                assert not pair.diff.roots
            path.unlink()


@pytest.mark.parametrize("step", [0, 3])
def test_a_change_in_the_traced_row_is_found_there(batch, prompt, plain, record, tmp_path, step):
    """The same change one row further is the root: its site, step, position and rank index."""
    batch.set_reduction("vllm-own")
    path = tmp_path / "traced.trace"
    with planted(batch, 9, lambda rows: rows.first, 2, step=step):
        record(batch, prompt.ids, path, steps=AGAIN, forced=plain[1])
    with ft.diff_traces(plain[0], path) as pair:
        (root,) = pair.diff.roots
        assert root.site.path == batch.sites[batch._layers[9].first].path
        assert root.step == step
        assert root.position == (0 if step == 0 else len(prompt.ids) + step - 1)
        assert [one.coordinate.rank_index for one in root.coordinates] == [2]


def test_another_batch_is_a_variant_and_never_a_root(
    batch, engine, prompt, plain, record, tmp_path
):
    """The same planted change against a recording of the request alone: launched differently, so no root."""
    engine.set_reduction("vllm-own")
    record(engine, prompt.ids, tmp_path / "alone.trace", steps=AGAIN, forced=plain[1])
    batch.set_reduction("vllm-own")
    with planted(batch, 9, lambda rows: rows.first, 2, step=3):
        record(batch, prompt.ids, tmp_path / "batch.trace", steps=AGAIN, forced=plain[1])
    with ft.diff_traces(tmp_path / "alone.trace", tmp_path / "batch.trace") as pair:
        assert not pair.diff.roots
        assert pair.diff.first_propagating is None
        assert any("launched differently" in sentence for sentence in pair.diff.coverage.missing)


def test_operations_are_those_of_the_traced_rows(batch, prompt, record, tmp_path):
    """With modules: a neighbour's changed row changes no digest of any operation; the traced row's changes some."""
    batch.set_reduction("vllm-own")
    record(batch, prompt.ids, tmp_path / "plain.trace", steps=3, modules=True)
    changes = {"neighbour": lambda rows: rows.first - 1, "traced": lambda rows: rows.first}
    differing = {}
    for name, row in changes.items():
        with planted(batch, 9, row, 2, step=2):
            record(batch, prompt.ids, tmp_path / f"{name}.trace", steps=3, modules=True)
        pairs = zip(
            frames_of(tmp_path / "plain.trace", 3),
            frames_of(tmp_path / f"{name}.trace", 3),
            strict=True,
        )
        differing[name] = {(one[0], one[1]) for one, other in pairs if one != other}
    assert not differing["neighbour"]
    assert {(2, Kind.OPERATION_OUTPUT), (2, Kind.MODULE_OUTPUT)} <= differing["traced"]


@pytest.mark.parametrize("who", ["traced", "neighbour"])
def test_preemption_voids_the_recording(batch, prompt, who):
    """vLLM takes the traced request, or a neighbour, off the batch: said, and a new start works."""
    request = batch._request
    batch.start(prompt.ids)
    batch.step()
    request._book(5, 1)
    scheduler = batch.host.scheduler
    name = request._id if who == "traced" else request.neighbours._running[-1].name
    taken = scheduler.requests[name]
    scheduler.running.remove(taken)
    scheduler._preempt_request(taken, 0.0)
    request._book = lambda token, step: None
    try:
        with pytest.raises(RecordingError, match=r"preempted (the request|neighbour 2)"):
            batch.step(5)
    finally:
        del request._book
    batch.start(prompt.ids)
    batch.step()


def test_blocks_that_run_out_void_the_recording(batch, prompt, generate):
    """No block is left for the next token of the traced request."""
    pool = batch.host.scheduler.kv_cache_manager.block_pool
    batch.start((prompt.ids * 8)[: batch.paged[0].block_size - 2])
    batch.step()
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    try:
        with pytest.raises(RecordingError, match=r"preempted|ended|scheduled"):
            run_on(batch, 4)
    finally:
        pool.free_blocks(taken)
    generate(batch, prompt.ids, 2)


def test_a_wrong_mapping_of_rows_voids_the_recording(batch, prompt, tmp_path, record, monkeypatch):
    """A traced row that is computed with a neighbour's adapter is noticed before anything is recorded of it."""
    manager = batch.host.runner.lora_manager._adapter_manager
    own = type(manager).set_adapter_mapping

    def confuse(self, mapping):
        if len(mapping.index_mapping) == 4:
            mapping.index_mapping = mapping.index_mapping[::-1]
        own(self, mapping)

    monkeypatch.setattr(type(manager), "set_adapter_mapping", confuse)
    with pytest.raises(RecordingError, match="mapped them to"):
        record(batch, prompt.ids, tmp_path / "one.trace", steps=3)


@pytest.mark.parametrize(
    ("neighbours", "error", "said"),
    [
        ([ft.Neighbour((5, 6), None)], UnsupportedModelError, "Give every neighbour an adapter"),
        ([(5, 6)] * 4, UnsupportedModelError, "max_num_seqs must be at least 5, and is 4"),
        ([None, (5, 6), None], InputError, "one place"),
        ([(5, 10**6)], InputError, "neighbour 0's prompt must have"),
        ([3], InputError, "number 0 is int"),
    ],
)
def test_neighbours_that_cannot_run_are_refused(llm, bundled, neighbours, error, said):
    """Each with its reason, before anything runs."""
    with pytest.raises(error, match=said), ft.attach(llm, bundled.adapter, neighbours=neighbours):
        pass


def test_a_users_llm_runs_a_batch(llm, bundled, prompt):
    """Attached with neighbours; prompts that do not fit into one forward are refused; nothing stays on it."""
    with ft.attach(llm, bundled.adapter, neighbours=[(5, 6, 7)] * 3) as tracer:
        tracer.start(prompt.ids)
        tracer.step()
        assert tracer.runtime.batch.requests == 4
        with pytest.raises(InputError, match="all prompts of a batch"):
            tracer.start((5,) * 505)
    assert not llm.llm_engine.has_unfinished_requests()
    assert not {"_prepare_inputs", "_sample"} & set(vars(tracer.host.runner))


def test_a_pair_of_a_batch_is_rebuilt_and_judged(llm, engine, bundled, tmp_path):
    """Two simulated schedules: both are rebuilt bit by bit with the same neighbours, edits land; alone is refused."""
    texts = [prompt.text for prompt in bundled.prompts[1:4]]
    beside = [texts[0], None, *texts[1:]]
    with ft.attach(llm, bundled.adapter, neighbours=beside) as batch:
        folder = flipped(batch, bundled, tmp_path)
        with ft.load_pair(folder) as pair:
            workbench = Workbench(pair, batch)
            for found in workbench.reconstruct():
                assert found.equal, found.first_mismatch
            root, flip = pair.diff.first_propagating, pair.diff.flip
            for claim in ([ShrinkEdit.of_coordinate(root.coordinates[0])], [CacheEdit(flip.step)]):
                verdict = workbench.prove(claim, free=False, shams=0)
                assert str(verdict.judgement) != "void", verdict.reasons
            with pytest.raises(InputError, match=r"with 3 neighbours .* runs one alone"):
                Workbench(pair, engine)
            again = recorded_neighbours(pair.reference.manifest, lambda name, sha: name)
            known = [one.prompt_ids for one in batch.loaded.neighbours.requests]
            assert [one and one.prompt for one in again] == [known[0], None, *known[1:]]


def flipped(engine, bundled, folder):
    """Save a pair whose token flipped after the first, with a surviving root."""
    for number, prompt in enumerate(bundled.prompts[:12]):
        with ft.trace_pair(
            engine,
            prompt=prompt.text,
            attempts=4,
            max_new_tokens=40,
            seed=10 * number,
            directory=folder / f"traces-{number}",
        ) as pair:
            diff = pair.diff
            if diff.flip is not None and diff.flip.step and diff.first_propagating is not None:
                assert "tokens and digests of all logits equal" in diff.coverage.observer_control
                pair.save(folder / "saved")
                return folder / "saved"
    raise AssertionError("no prompt of twelve flipped within 40 tokens and 4 attempts")


def test_files_and_numbers_of_neighbours(bundled, tmp_path):
    """A number takes bundled problems; a file holds texts, ids, adapters and the traced one's place; else refused."""
    assert read_neighbours(None, "auto") == ()
    assert read_neighbours("2", "vllm") == tuple(one.text for one in bundled.prompts[:2])
    path = tmp_path / "batch.jsonl"
    lines = [
        "two and two",
        {"traced": True},
        {"prompt_ids": [5, 6], "adapter": None},
        {"prompt": "x"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_neighbours(str(path), "vllm") == (
        "two and two",
        None,
        ft.Neighbour((5, 6), None),
        ft.Neighbour("x"),
    )
    for wrong in (
        '{"prompt_ids": "x"}',
        '{"prompt": "x", "lora": 1}',
        "nonsense",
        '{"traced": true}',
    ):
        path.write_text(wrong)
        with pytest.raises(InputError, match=r"line 1|holds no neighbour"):
            read_neighbours(str(path), "vllm")
    for word, engine in (("0", "vllm"), ("2", "auto"), (str(tmp_path / "none"), "vllm")):
        with pytest.raises(FliptraceError):
            read_neighbours(word, engine)


def test_the_command_traces_a_batch(bundled, tmp_path):
    """trace-pair --neighbours: the manifest names the batch; redacted, it holds no prompt of it."""
    code = trace_pair(
        engine=EngineName.VLLM,
        model=bundled.model,
        adapter=bundled.adapter,
        neighbours="2",
        prompt=[bundled.prompts[5].text],
        reduction="unsplit",
        attempts=1,
        max_new_tokens=4,
        redact=True,
        quiet=True,
        out=tmp_path / "pair",
    )
    assert code == 0
    with open_trace(tmp_path / "pair" / "reference.trace") as trace:
        section = trace.manifest.get("engine.neighbours")
        assert section["count"] == 2
        assert "sha256" not in section
        assert all(
            set(one) == {"prompt_tokens", "adapter", "adapter_sha256"}
            for one in section["requests"]
        )
        with pytest.raises(InputError, match="is redacted"):
            recorded_neighbours(trace.manifest, lambda name, sha: name)
