"""Two ranks of the bundled model on the CPU: seen as one engine, compared, edited, and ended when one of them dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fliptrace as ft
from fliptrace.capture.decoding import choose
from fliptrace.capture.interception import checked_replacement
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.capture.vllm_engine.tensor_parallel.conversation import Conversation
from fliptrace.capture.vllm_engine.tensor_parallel.joining import Operation, joined_operations
from fliptrace.capture.vllm_engine.tensor_parallel.messages import Command
from fliptrace.capture.vllm_engine.tensor_parallel.processes import RankGroup
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError
from fliptrace.manifest import Manifest
from fliptrace.numerics import integer_view
from fliptrace.sites import Site
from fliptrace.store import TraceReader, TraceWriter
from fliptrace.trace import Closing
from fliptrace.verdicts import Origin
from fliptrace.views.story import tell_story
from fliptrace_interventions import ShrinkEdit, Workbench

ARGUMENTS = {"tensor_parallel_size": 2}


def is_running(process_id):
    """A process that is there and no zombie."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture(scope="module")
def ranks(bundled):
    """The engine of two ranks; the last test ends it."""
    engine = ft.load_engine(
        str(bundled.model), str(bundled.adapter), engine="vllm", vllm_arguments=ARGUMENTS
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(ranks):
    """The same, unsplit."""
    ranks.set_reduction("unsplit")
    return ranks


@pytest.fixture(scope="module")
def ids(ranks, bundled):
    """A prompt."""
    return ft.encode_prompt(ranks.tokenizer, bundled.prompts[0].text).ids


def same(one, other):
    return torch.equal(integer_view(one.contiguous()), integer_view(other.contiguous()))


def test_sites_are_those_of_all_ranks(engine, shared_engine):
    """Rank after rank at every place of the engine of one process; names say the rank."""
    expected = [f"{site.path}@rank{rank}" for site in shared_engine.sites for rank in (0, 1)]
    assert [site.path for site in engine.sites] == expected
    assert [site.parallel_rank for site in engine.sites[:4]] == [0, 1, 0, 1]
    assert engine.sites[0].name == "layer 0 self_attn.qkv_proj[q_proj] (rank 0)"
    assert Site.from_path("model.layers.0.mlp.down_proj").name == "layer 0 mlp.down_proj"
    stated = engine.describe()["engine"]["tensor_parallel"]
    assert stated["ranks"] == 2
    assert all(path.endswith(("o_proj", "down_proj")) for path in stated["row_parallel_sites"])
    assert len(stated["row_parallel_sites"]) == 2 * len(engine.cache_layers)


def test_no_file_is_left_to_whoever_ends_the_ranks(ranks):
    """vLLM's shared memory has no name any more, so it ends with the processes, however they end."""
    mapped = [
        line
        for process_id in ranks.group.process_ids
        for line in Path(f"/proc/{process_id}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    ]
    assert any("cpushm" in line for line in mapped)
    assert any("psm_" in line for line in mapped)
    assert all(line.endswith("(deleted)") for line in mapped)


def test_weights_are_whole_or_slices_of_k(engine, shared_engine):
    """Column-parallel ranks have all of A, row-parallel ranks their slices of K."""
    for number, site in enumerate(shared_engine.sites[:7]):
        whole = shared_engine.shrink_weight(number)
        parts = [engine.shrink_weight(2 * number + rank) for rank in (0, 1)]
        if site.module.endswith(("o_proj", "down_proj")):
            assert same(torch.cat(parts, dim=1), whole)
        else:
            assert same(parts[0], whole)
            assert same(parts[1], whole)


def test_a_run_repeats_and_its_cache_is_restored(engine, shared_engine, ids, generate):
    """Logits bit by bit; the cache has the heads of both ranks, is written back and gives the same steps."""
    tokens, rows = generate(engine, ids, 6)
    again, other = generate(engine, ids, 6)
    assert tokens == again
    assert all(same(one, two) for one, two in zip(rows, other, strict=True))
    engine.start(ids)
    for token in (None, *tokens[:3]):
        engine.step(token)
    content = engine.read_cache()
    shared_engine.start(ids)
    shared_engine.step()
    alone = shared_engine.read_cache()
    shared_engine._request.end()
    assert [layer.values.shape[2:] for layer in content] == [
        layer.values.shape[2:] for layer in alone
    ]
    # The first layer's keys and values are columns of one product: cut in two, they keep their bits.
    assert same(content[0].values[:, : len(ids)], alone[0].values)
    engine.start((5, 6, 7))
    engine.step()
    engine.write_cache(content, 4)
    assert engine.step_number == 4
    for now, before in zip(engine.read_cache(), content, strict=True):
        assert same(now.values, before.values)
    assert same(engine.step(tokens[3]), rows[4])


@pytest.mark.parametrize("operands", [False, True])
def test_one_transfer_holds_what_calls_report(engine, ids, record, tmp_path, operands):
    """Every frame of every step is the same, byte by byte, whether ranks export slots or tell record by record."""
    engine.set_reduction("atomic:8", 3)
    frames = []
    for by_calls in (False, True):
        path = tmp_path / f"{by_calls}.trace"
        record(engine, ids, path, by_calls=by_calls, operands=operands, steps=6)
        with TraceReader(path) as trace:
            frames.append(
                [
                    (step, kind, frame.layout, bytes(frame.payload), _listed(frame.digests))
                    for step in range(6)
                    for kind, frame in trace.step_frames(step).items()
                ]
            )
            digests = [step.cache_digest for step in trace.steps]
            frames[-1].append(digests)
    assert frames[0] == frames[1]


def _listed(digests):
    return None if digests is None else digests.tolist()


class Plant:
    """Changes one element of one shrink in one step, so that it survives rounding or not; notes who was asked."""

    def __init__(self, engine, site, step, index, bit=18):
        self.engine, self.site, self.step, self.index, self.bit = engine, site, step, index, bit
        self.asked = []

    def __call__(self, site, operand, z):
        self.asked.append(site)
        if (site, self.engine.step_number) != (self.site, self.step):
            return z
        changed = z.clone()
        integer_view(changed)[-1, self.index] += 1 << self.bit
        return checked_replacement(changed, site, z)


@pytest.mark.parametrize(
    ("module", "rank", "step"),
    [("self_attn.qkv_proj[k_proj]", 1, 0), ("mlp.down_proj", 1, 3), ("mlp.down_proj", 0, 2)],
)
def test_a_fault_on_one_rank_is_found_there_and_only_there(
    engine, ids, record, tmp_path, module, rank, step
):
    """One element on one rank: the root is that coordinate, and all shrinks before it and beside it keep their bits."""
    path = f"model.layers.2.{module}@rank{rank}"
    site = [each.path for each in engine.sites].index(path)
    plant = Plant(engine, site, step, 5)
    record(engine, ids, tmp_path / "reference.trace", steps=6)
    with engine.intercepted(plant):
        record(engine, ids, tmp_path / "candidate.trace", steps=6)
    count = len(engine.sites)
    assert plant.asked[:count] == list(range(count))
    with ft.diff_traces(tmp_path / "reference.trace", tmp_path / "candidate.trace") as pair:
        root = pair.diff.first_surviving
        assert (root.site.path, root.step) == (path, step)
        assert root.position == len(ids) - 1 + step
        assert [each.coordinate.rank_index for each in root.coordinates] == [5]
        assert f"(rank {rank})" in root.name
        frames = [trace.frame(step, ft.Kind.SHRINK) for trace in (pair.reference, pair.candidate)]
        beside = site ^ 1
        for each in (*range(site), beside):
            if each != site:
                assert frames[0].record_bytes(each) == frames[1].record_bytes(each)
        assert all(found.disagreeing_rows == (step == 0 and i) for i, found in _agreement(pair))


def _agreement(pair):
    """Only the k_proj of the candidate's prefill differs from its other rank's."""
    return enumerate(pair.diff.rank_agreement)


def test_ranks_that_disagree_are_told(engine, ids, record, tmp_path):
    """Arrival orders are each rank's own: one execution's column-parallel ranks differ, and the report says so."""
    for number, reduction in enumerate(("unsplit", "atomic:8")):
        engine.set_reduction(reduction, 5 if number else None)
        path = tmp_path / f"{number}.trace"
        record(engine, ids, path, steps=3)
        with ft.diff_traces(path, path) as pair:
            found = pair.diff.rank_agreement[0]
            assert found.compared_rows > 0
            assert bool(found.disagreeing_rows) == bool(number)
            told = tell_story(pair.diff, pair.reference, pair.candidate)
            text = " ".join(each for passage in told.passages for each in passage.sentences)
            assert ("ranks disagree within this one execution" in text) == bool(number)
            if number:
                assert found.first.site.parallel_rank == 1
                assert "o_proj" not in found.first.site.path


@pytest.fixture(scope="module")
def differing(ranks, bundled, tmp_path_factory):
    """A saved pair of a few tokens with a surviving root that propagates."""
    for number, prompt in enumerate(bundled.prompts[:8]):
        root = tmp_path_factory.mktemp("pair")
        with ft.trace_pair(
            ranks,
            prompt=prompt.text,
            attempts=2,
            max_new_tokens=4,
            seed=10 * number,
            until="surviving",
            observer_control=number == 0,
            directory=root / "traces",
        ) as pair:
            if pair.diff.first_propagating:
                pair.save(root / "saved")
                return root / "saved"
    raise AssertionError("no prompt of eight had a surviving root within 4 tokens and 2 attempts")


def test_a_cause_on_one_rank_is_put_in_there(differing, ranks):
    """Both executions are rebuilt bit by bit; one coordinate of one rank is put in and arrives at its expand."""
    with ft.load_pair(differing) as pair:
        root = pair.diff.first_propagating
        target = len(pair.reference.steps) - 1 if pair.diff.flip is None else pair.diff.flip.step
        workbench = Workbench(pair, ranks, target=max(target, root.step))
        for found in workbench.reconstruct():
            assert found.equal, found.first_mismatch
        index = root.coordinates[0].coordinate.rank_index
        edit = ShrinkEdit(root.site.path, root.step, (root.position,), (index,), expect=1)
        verdict = workbench.prove([edit], free=False, shams=0)
        assert str(verdict.judgement) != "void", verdict.reasons
        for direction in verdict.directions:
            (receipt,) = direction.edited.receipts
            assert receipt.landed
            assert f"(rank {root.site.parallel_rank})" in receipt.place
        assert (differing / "report.html").stat().st_size > 10_000


def test_what_cannot_be_recorded_is_refused(bundled, engine):
    """Before any process starts, with a reason."""
    for arguments, why in (
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        ({"data_parallel_size": 2}, "data_parallel_size must be 1"),
        ({"fully_sharded_loras": True, **ARGUMENTS}, "parts of a shrink"),
        ({"enable_expert_parallel": True, **ARGUMENTS}, "other experts"),
    ):
        with pytest.raises(UnsupportedModelError, match=why):
            ft.load_engine(
                str(bundled.model), str(bundled.adapter), engine="vllm", vllm_arguments=arguments
            )
    with pytest.raises(InputError, match="whole number"):
        ft.load_engine(
            str(bundled.model),
            str(bundled.adapter),
            engine="vllm",
            vllm_arguments={"tensor_parallel_size": "two"},
        )
    with pytest.raises(InputError, match="rank 0 of 2"):
        engine.set_reduction("atomic:8")
    engine.start((5, 6, 7))
    engine.step()
    first, *others = engine.read_cache()
    odd = type(first)(first.layer, first.values[:, :, :1], first.first_position, first.window)
    with pytest.raises(InputError, match="heads of 2 ranks"):
        engine.write_cache([odd, *others], 3)


class RunThere:
    """Runs code in a rank's process, where ``server`` is its RankServer: what a command brings is unpickled there."""

    def __init__(self, source):
        self.source = source

    def __reduce__(self):
        find = (
            "import sys\n"
            "frame = sys._getframe()\n"
            "while 'server' not in frame.f_locals:\n"
            "    frame = frame.f_back\n"
            "server = frame.f_locals['server']\n"
            "runtime = server.engine.runtime\n"
            "def is_due(step):\n"
            "    return runtime.rows and runtime.step == step\n"
        )
        return exec, (find + self.source, {})


@contextlib.contextmanager
def planted(engine, source, undo):
    """Run code on all ranks, and other code afterwards."""
    engine._talk.all_of(Command("keep_operands", (RunThere(source),)))
    try:
        yield
    finally:
        engine._talk.all_of(Command("keep_operands", (RunThere(undo),)))


def base_fault(name, rank, step):
    """One element of one rank's base projection in one step."""
    layer = (
        f"layer = next(one for one in server.engine._layers if one.name == {name!r})\n"
        "method = layer.module.base_layer.quant_method\n"
    )
    source = (
        "own = method.apply\n"
        "def change(*given, **named):\n"
        "    output = own(*given, **named)\n"
        f"    if is_due({step}) and server.rank == {rank}:\n"
        "        output[-1, 3] += 1.0\n"
        "    return output\n"
        "method.apply = change\n"
    )
    return layer + source, layer + "del method.apply\n"


def sum_fault(number, step):
    """One element of one sum over ranks, the same on all of them, in one step."""
    group = "from vllm.distributed import get_tp_group\ncommunicator = get_tp_group().device_communicator\n"
    source = (
        "own, seen = communicator.all_reduce, []\n"
        "def change(*given, **named):\n"
        "    output = own(*given, **named)\n"
        f"    if is_due({step}):\n"
        "        seen.append(1)\n"
        f"        if len(seen) == {number + 1}:\n"
        "            output.view(-1)[3] += 1.0\n"
        "    return output\n"
        "communicator.all_reduce = change\n"
    )
    return group + source, group + "del communicator.all_reduce\n"


OPERATION_STEPS = 3


@pytest.fixture(scope="module")
def operations(ranks, ids, record, tmp_path_factory):
    """A trace with modules, without any fault, and its tokens."""
    ranks.set_reduction("unsplit")
    path = tmp_path_factory.mktemp("operations") / "reference.trace"
    return path, record(ranks, ids, path, modules=True, steps=OPERATION_STEPS)


@pytest.fixture
def against(engine, ids, record, operations, tmp_path):
    """A function that records a candidate, fed the reference's tokens, and opens the pair."""

    def run():
        path = tmp_path / "candidate.trace"
        record(engine, ids, path, modules=True, steps=OPERATION_STEPS, forced=operations[1])
        return ft.diff_traces(operations[0], path)

    return run


def differing_operations(pair, step):
    """Labels in order: operations whose inputs differ, and those whose outputs do."""
    found = []
    for kind in (ft.Kind.OPERATION_INPUT, ft.Kind.OPERATION_OUTPUT):
        one, other = (trace.frame(step, kind) for trace in (pair.reference, pair.candidate))
        assert one.layout == other.layout
        found.append(
            [
                entry.key
                for number, entry in enumerate(one.layout.entries)
                if one.record_bytes(number) != other.record_bytes(number)
            ]
        )
    return found


def test_operations_of_ranks_are_watched(engine, ids, record, operations, against, tmp_path):
    """At each place rank 0 comes first, sums have no rank, nothing differs twice over, and tokens are the same."""
    assert record(engine, ids, tmp_path / "plain.trace", steps=OPERATION_STEPS) == operations[1]
    with against() as pair:
        assert str(pair.diff.outcome) == "identical"
        for step in range(OPERATION_STEPS):
            frame = pair.reference.frame(step, ft.Kind.OPERATION_OUTPUT)
            keys = [entry.key for entry in frame.layout.entries]
            # Per layer 20 operations on each rank and two sums; the embedding is two around a sum, the logits likewise.
            assert len(keys) == 8 * (2 * 20 + 2) + 2 * 5 + 2
            start = "model.embed_tokens"
            assert keys[:5] == [
                f"{start}@rank0/VocabParallelEmbeddingWithLoRA#0",
                f"{start}@rank1/VocabParallelEmbeddingWithLoRA#0",
                f"{start}/all_reduce#0",
                f"{start}@rank0/after_all_reduce#0",
                f"{start}@rank1/after_all_reduce#0",
            ]
            assert [key for key in keys if key.startswith("model.layers.3.mlp.down_proj")] == [
                "model.layers.3.mlp.down_proj@rank0/base_projection#0",
                "model.layers.3.mlp.down_proj@rank1/base_projection#0",
                "model.layers.3.mlp.down_proj@rank0/lora_shrink#0",
                "model.layers.3.mlp.down_proj@rank1/lora_shrink#0",
                "model.layers.3.mlp.down_proj@rank0/lora_expand#0",
                "model.layers.3.mlp.down_proj@rank1/lora_expand#0",
                "model.layers.3.mlp.down_proj/all_reduce#0",
            ]
            assert keys[-3].endswith("/all_gather#0")


@pytest.mark.parametrize(
    ("module", "rank", "step"),
    [("mlp.down_proj", 1, 2), ("self_attn.qkv_proj", 1, 0), ("mlp.down_proj", 0, 1)],
)
def test_a_root_in_one_ranks_operation_is_named_there(engine, ids, against, module, rank, step):
    """A fault in a base projection of one rank: that is the root, and the other rank inherits it by the next sum."""
    name = f"model.layers.3.{module}"
    with planted(engine, *base_fault(name, rank, step)), against() as pair:
        found = pair.diff.foreign_root
        assert found.key == f"{name}@rank{rank}/base_projection#0"
        assert (found.origin, found.step) == (Origin.ROOT, step)
        assert found.position == len(ids) - 1 + step
        assert not pair.diff.roots
        inputs, outputs = differing_operations(pair, step)
        assert set(outputs) - set(inputs) == {found.key}
        beside = [key for key in inputs if f"@rank{1 - rank}/" in key]
        summed = next(key for key in inputs if key.endswith("/all_reduce#0"))
        assert inputs.index(summed) < inputs.index(beside[0])


def test_a_root_in_a_sum_is_named_as_the_sum(engine, against):
    """All ranks got another sum of equal parts: the all-reduce is the root, and no rank is blamed."""
    with planted(engine, *sum_fault(2 * 3 + 2, 1)), against() as pair:
        found = pair.diff.foreign_root
        assert found.key == "model.layers.3.mlp.down_proj/all_reduce#0"
        assert (found.origin, found.step, found.kind) == (Origin.ROOT, 1, "operation")
        assert not pair.diff.roots
        assert (
            "all_reduce in model.layers.3.mlp.down_proj got bit-equal inputs" in found.explanation
        )


def test_other_ranks_inherit_through_the_sum(engine, ids, against):
    """A shrink of rank 1 is changed: everything of rank 0 that differs follows a sum, and no operation is a root."""
    path = "model.layers.2.mlp.down_proj@rank1"
    site = [each.path for each in engine.sites].index(path)
    with engine.intercepted(Plant(engine, site, 1, 5)), against() as pair:
        assert pair.diff.first_surviving.site.path == path
        assert pair.diff.foreign_root is None
        inputs, outputs = differing_operations(pair, 1)
        assert set(outputs) - set(inputs) == {f"{path}/lora_shrink#0"}
        summed = "model.layers.2.mlp.down_proj/all_reduce#0"
        assert inputs[:2] == [f"{path}/lora_expand#0", summed]
        assert summed in outputs
        assert inputs[2] == "model.layers.3.input_layernorm@rank0/RMSNorm#0"
        # Modules around the sum: what differs in their outputs came in by their inputs on some rank, or by the root.
        one, other = (
            trace.frame(1, ft.Kind.MODULE_OUTPUT) for trace in (pair.reference, pair.candidate)
        )
        changed = {
            entry.key
            for number, entry in enumerate(one.layout.entries)
            if one.record_bytes(number) != other.record_bytes(number)
        }
        assert {f"model.layers.2.mlp.down_proj@rank{rank}" for rank in (0, 1)} <= changed


def test_a_latent_difference_on_a_rank_is_nobodys_root(engine, against):
    """The slice of a fused layer on rank 1 differs and rounds away: neither its expand nor another rank is blamed."""
    path = "model.layers.2.self_attn.qkv_proj[k_proj]@rank1"
    site = [each.path for each in engine.sites].index(path)
    with engine.intercepted(Plant(engine, site, 1, 5, bit=0)), against() as pair:
        assert pair.diff.first_surviving is None
        assert pair.diff.first_difference.site.path == path
        assert pair.diff.foreign_root is None


def test_other_collectives_are_refused_with_operations(engine, ids, record, tmp_path):
    """Ranks that get different things cannot be told apart; the engine goes on afterwards."""
    layer = "layer = server.engine.host.runner.model.get_submodule('model.norm')\n"
    source = (
        "from vllm.distributed import get_tp_group\n"
        "layer.planted = layer.register_forward_hook(\n"
        "    lambda module, given, output: get_tp_group().reduce_scatter(output[0], 0) and None)\n"
    )
    with (
        planted(engine, layer + source, layer + "layer.planted.remove()\ndel layer.planted\n"),
        pytest.raises(RecordingError, match="ranks meet in reduce_scatter"),
    ):
        record(engine, ids, tmp_path / "refused.trace", modules=True, steps=1)
    assert len(record(engine, ids, tmp_path / "next.trace", modules=True, steps=1)) == 1


def test_ranks_that_got_other_sums_are_an_error():
    """One rank has other bits: no execution could be told from another."""
    rows = torch.arange(4, dtype=torch.int64).view(2, 2)
    sums = [Operation("model.mlp/all_reduce#0", False, rows, rows + rank) for rank in (0, 1)]
    with pytest.raises(RecordingError, match="same on all ranks, and rank 1 has other bits"):
        list(joined_operations([[one] for one in sums]))
    with pytest.raises(
        RecordingError, match=r"rank 1 ran nothing more where rank 0 ran model\.mlp"
    ):
        list(joined_operations([sums[:1], []]))


def test_modules_around_a_sum_depend_on_all_ranks():
    """What rank 1 brings into a module with a sum is an input of that module on rank 0, and of no module beside it."""

    def told(brought):
        plain = torch.zeros((1, 2), dtype=torch.int64)
        changed = plain + brought
        return [
            [
                Operation("model.mlp.down", True, mine, plain),
                Operation("model.mlp.act", True, mine, plain),
                Operation("model.mlp.down/all_reduce#0", False, mine, plain),
            ]
            for mine in (plain, changed)
        ]

    before, after = (
        {one.key: one.inputs for one in joined_operations(told(brought))} for brought in (0, 1)
    )
    differing = [key for key in before if not torch.equal(before[key], after[key])]
    assert differing == [
        "model.mlp.down@rank0",
        "model.mlp.down@rank1",
        "model.mlp.act@rank1",
        "model.mlp.down/all_reduce#0",
    ]


def test_an_observer_that_fails_leaves_the_ranks_alive(engine, ids, generate):
    """What an interceptor raises arrives, and the next execution runs."""

    def fail(site, operand, z):
        raise ValueError("not this one")

    engine.start(ids)
    with engine.intercepted(fail), pytest.raises(ValueError, match="not this one"):
        engine.step()
    with pytest.raises(RecordingError, match="start"):
        engine.step()
    assert len(generate(engine, ids, 3)[0]) == 3


def test_an_interceptor_may_come_and_go_while_steps_are_recorded(engine, ids, tmp_path):
    """Steps are told record by record while it is there and kept by the ranks before and after it: the same frames."""
    frames = []
    for passing in (False, True):
        path = tmp_path / f"{passing}.trace"
        with TraceWriter(path, Manifest(engine.describe())) as writer:
            recorder = Recorder(engine, writer, RecorderOptions())
            with engine.observed(recorder):
                engine.start(ids)
                token = None
                for step in range(5):
                    with contextlib.ExitStack() as stack:
                        if passing and step == 2:
                            stack.enter_context(engine.intercepted(lambda _, __, z: z))
                        logits = engine.step(token)
                    choice = choose(logits, step)
                    recorder.complete_step(step, choice, logits)
                    token = choice.token
            recorder.finish()
            writer.close(Closing(complete=True, stop_reason="max new tokens", steps=5))
        with TraceReader(path) as trace:
            frames.append(
                [
                    (step, kind, bytes(frame.payload))
                    for step in range(5)
                    for kind, frame in trace.step_frames(step).items()
                ]
            )
    assert frames[0] == frames[1]


def test_a_command_that_is_interrupted_ends_the_ranks(bundled, vllm_cpu):
    """What a rank would say next answers nothing any more, whether one was asked or all."""
    for interrupted in ("one", "all_of"):
        group = RankGroup(2, {"model": "", "adapter": "", "device": "cpu", "arguments": {}})
        talk = Conversation(group)

        def interrupt(*_):
            raise KeyboardInterrupt

        group.send = interrupt
        arguments = (1, Command("describe")) if interrupted == "one" else (Command("describe"),)
        with pytest.raises(KeyboardInterrupt):
            getattr(talk, interrupted)(*arguments)
        assert "interrupted" in group.trouble
        assert not any(map(is_running, group.process_ids))
        group.close()


def test_ranks_end_with_a_driver_that_is_killed(bundled, vllm_cpu):
    """Killed outright, the driver can tell nobody; its ranks notice."""
    script = (
        "import sys, time\n"
        "from fliptrace.capture.vllm_engine.tensor_parallel.processes import RankGroup\n"
        "group = RankGroup(2, {'model': sys.argv[1], 'adapter': sys.argv[2], 'device': 'cpu',"
        " 'dtype': 'auto', 'arguments': {}})\n"
        "print(*group.process_ids, flush=True)\n"
        "time.sleep(60)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script, str(bundled.model), str(bundled.adapter)],
        stdout=subprocess.PIPE,
        text=True,
    )
    process_ids = [int(each) for each in driver.stdout.readline().split()]
    assert len(process_ids) == 2
    assert all(map(is_running, process_ids))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert wait_until(lambda: not any(map(is_running, process_ids)), 60)


def test_a_rank_that_dies_ends_the_command(bundled, vllm_cpu, tmp_path):
    """Exit code 2, one line that names the rank; what was acknowledged of the trace can be read; nobody is left."""
    folder = tmp_path / ".pair.partial"  # until the run is complete
    command = [
        sys.executable,
        "-m",
        "fliptrace.command_line.trace_pair",
        *("--model", str(bundled.model), "--adapter", str(bundled.adapter)),
        *("--engine", "vllm", "--vllm-argument", "tensor_parallel_size=2", "--quiet"),
        *(
            "--prompt",
            bundled.prompts[0].text,
            "--no-observer-control",
            "--out",
            str(tmp_path / "pair"),
        ),
        # Repeatable, so that candidates follow one another until one of the ranks is killed.
        *("--reduction", "deterministic:8", "--attempts", "5000"),
    ]
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL)
        try:
            assert wait_until(lambda: list(folder.glob("candidate*.trace")), 120)
            children = children_of(process.pid)
            assert len(children) == 2
            os.kill(children[1], signal.SIGKILL)
            assert process.wait(60) == 2
        finally:
            process.kill()
        errors.seek(0)
        said = errors.read()
    assert "rank 1 of 2 was ended by SIGKILL" in said
    assert len(said.strip().splitlines()) == 1
    assert not any(map(is_running, children))
    found = {}
    for path in folder.glob("*.trace"):
        with ft.open_trace(path) as trace:
            assert [step.step for step in trace.steps] == list(range(len(trace.steps)))
            found[trace.closing.complete] = (len(trace.steps), trace.closing.stop_reason)
    assert found[True][0] > 0
    assert "rank 1 of 2" in found[False][1]


def children_of(process_id):
    """Return the processes that a process started, oldest first."""
    import psutil

    children = psutil.Process(process_id).children()
    return [each.pid for each in sorted(children, key=lambda each: each.create_time())]


def test_closing_ends_all_processes(ranks):
    """No process is left, and the engine says what to do."""
    process_ids = ranks.group.process_ids
    assert all(map(is_running, process_ids))
    ranks.close()
    assert not any(map(is_running, process_ids))
    with pytest.raises(RecordingError, match=r"closed.*Load the engine again"):
        ranks.start((5, 6))
