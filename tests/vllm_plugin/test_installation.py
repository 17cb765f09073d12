"""An operator with vLLM's signature, replaced in torch's dispatcher."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fliptrace_kernels import lora_shrink, parse_reduction
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.installation import install
from fliptrace_kernels.vllm_plugin.settings import Settings
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

REPEATABLE = ["unsplit", "deterministic:8", "deterministic:3/128", "tree:8", "local"]
SHAPE = {"rows": 7, "size": 100, "rank": 8, "slices": 3, "adapters": 2}


def settings(name="deterministic:8", count=False):
    return Settings(parse_reduction(name), count)


def bits(tensor):
    return tensor.view(torch.int32)


def same(first, second):
    return torch.equal(bits(first), bits(second))


@pytest.fixture
def call(operators):
    """A function that calls a replaced operator as vLLM does and returns what it wrote."""

    def called(operator, *, scaling=1.0, no_lora=False, out=None, **shape):
        x, weights, output, mapping = operators.tensors(**{**SHAPE, **shape})
        output = output if out is None else out
        meta = operators.metadata(mapping, len(weights[0]), no_lora=no_lora)
        operator.call(x, weights, output, *meta, scaling)
        return output

    return called


@pytest.fixture
def expected(operators):
    """A function that computes the same by the public call."""

    def computed(reduction, *, scaling=1.0, **shape):
        x, weights, _, mapping = operators.tensors(**{**SHAPE, **shape})
        slices = [weight.squeeze(1) for weight in weights]
        return lora_shrink(x, slices, mapping, reduction=reduction, scale=scaling)

    return computed


@pytest.mark.parametrize("reduction", REPEATABLE)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"rows": 1},
        {"rows": 33, "adapters": 1, "slices": 1, "rank": 16, "size": 576},
        {"dtype": torch.float16},
        {"scaling": 0.7},
        {"adapters": 5, "slices": 4, "rank": 1},
    ],
    ids=str,
)
def test_the_operator_runs_the_reduction(operators, call, expected, reduction, shape):
    """Every bit is that of `lora_shrink`, rows without an adapter come out as 0.0, nothing stays NaN."""
    operator = operators.define()
    install(settings(reduction), operator)
    assert same(call(operator, **shape), expected(reduction, **shape))


def test_before_it_is_replaced_the_operator_does_something_else(operators, call, expected):
    """The comparison above fails on an operator that nobody replaced."""
    operator = operators.define()
    assert not same(call(operator), expected("deterministic:8"))
    assert (call(operator) == -7.0).all()


def test_two_reductions_differ(operators, call, expected):
    """The comparison above tells one reduction from another."""
    operator = operators.define()
    install(settings("unsplit"), operator)
    shape = {"size": 2048, "rank": 16}
    assert not same(call(operator, **shape), expected("deterministic:8", **shape))


def test_a_strided_output_is_written_where_it_lies(operators, call, expected):
    """The output may be a view, and what lies between its elements stays."""
    operator = operators.define()
    install(settings(), operator)
    store = torch.full((7, 3, 20), float("nan"))
    assert same(call(operator, out=store.permute(1, 0, 2)[..., :8]), expected("deterministic:8"))
    assert torch.isnan(store[..., 8:]).all()


def test_without_lora_the_output_stays_as_it_is(operators, call):
    """As in vLLM, whose expand does not read it then."""
    operator = operators.define()
    install(settings(), operator)
    assert torch.isnan(call(operator, no_lora=True)).all()


def test_no_rows_are_no_work(operators, call):
    """An empty batch is no error."""
    operator = operators.define()
    install(settings(), operator)
    assert call(operator, rows=0).shape == (3, 0, 8)


def test_weights_written_in_place_are_seen(operators, expected):
    """vLLM loads an adapter into the tensors of the one before it."""
    operator = operators.define()
    install(settings(), operator)
    x, weights, out, mapping = operators.tensors(**SHAPE)
    meta = operators.metadata(mapping, 2)
    operator.call(x, weights, out, *meta, 1.0)
    for weight in weights:
        weight.mul_(-1)
    operator.call(x, weights, out, *meta, 1.0)
    assert torch.equal(out, -expected("deterministic:8"))


def test_installing_again_changes_nothing(operators):
    """vLLM may load a plugin more than once."""
    operator = operators.define()
    first = install(settings(), operator)
    assert install(settings(), operator) is first
    assert first.is_reached(torch.device("cpu"))


@pytest.mark.parametrize("other", [settings("unsplit"), settings(count=True)], ids=str)
def test_other_settings_in_the_same_process_are_an_error(operators, other):
    """What torch's dispatcher was given stays; a second wish is not ignored."""
    operator = operators.define()
    install(settings(), operator)
    with pytest.raises(PluginError, match=r"already replaced .*deterministic:8/32.*for good; got"):
        install(other, operator)


def test_someone_who_replaces_it_later_is_noticed(operators):
    """`is_reached` asks the dispatcher, not a flag."""
    operator = operators.define()
    installation = install(settings(), operator)
    kept = operator.override(operators.mark)
    assert not installation.is_reached(torch.device("cpu"))
    del kept


def test_replacing_is_silent(operators):
    """torch's warning about an overridden kernel says what was wanted here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        install(settings(), operators.define())
    assert caught == []


def changed(old, new):
    return lambda signature: signature.replace(old, new)


@pytest.mark.parametrize(
    "change",
    [
        changed("float scaling", "int scaling"),
        changed("Tensor inputs", "Tensor input"),
        changed("Tensor[] lora_a_weights", "Tensor lora_a_weights"),
        changed("Tensor(a2!) output_tensor", "Tensor output_tensor"),
        changed(", float scaling)", ")"),
        changed("float scaling)", "float scaling, bool use_gdc=False)"),
        changed("-> ()", "-> Tensor"),
        changed("Tensor inputs", "Tensor(b!) inputs"),
    ],
)
def test_another_signature_is_an_error(operators, change):
    """Names, types, what is written to and what is returned: any change is refused, and shown."""
    signature = change(operators.SIGNATURE)
    assert signature != operators.SIGNATURE
    operator = operators.define(signature)
    with pytest.raises(
        PluginError, match=r"must take inputs \(Tensor\).*; this vLLM has fliptrace_"
    ):
        install(settings(), operator)
    with pytest.raises(PluginError):
        install(settings(), operator)


def test_a_missing_operator_is_an_error():
    """Nothing is replaced that is not there."""
    with pytest.raises(PluginError, match=r"fliptrace_none::lora_shrink .*has no such operator"):
        install(settings(), Operator("fliptrace_none"))


def test_an_operator_for_another_kind_of_device_is_an_error(operators):
    """vLLM on a CPU defines the operator too, but never calls it."""
    operator = operators.define(dispatch_key=None)
    with pytest.raises(PluginError, match=r"must have a kernel for CPU"):
        install(settings(), operator)


def test_shapes_are_computed_without_running(operators):
    """Tracing meets the operator with fake tensors, before and after."""
    operator = operators.define()
    installation = install(settings(), operator)
    with FakeTensorMode():
        x, weights, out, mapping = operators.tensors(**SHAPE)
        assert (
            operator.call(x, weights, out, *([mapping] * 5), torch.ones(1), torch.ones(1), 1.0)
            is None
        )
    assert installation.replacement.layers == 0


def test_a_compiled_graph_holds_the_operator_and_not_what_runs_inside(operators, expected):
    """What torch.compile keeps, in memory or on disk, does not depend on the reduction."""
    operator = operators.define()
    install(settings(), operator)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=keep, fullgraph=True, dynamic=True)
    def layer(x, weights, mapping, meta):
        out = torch.empty(len(weights), x.shape[0], 8)
        getattr(torch.ops, operator.namespace).lora_shrink(x, weights, out, mapping, *meta, 1.0)
        return out * 2

    for rows in (7, 12):
        x, weights, _, mapping = operators.tensors(**{**SHAPE, "rows": rows})
        found = layer(x, weights, mapping, operators.metadata(mapping, 2)[1:])
        assert torch.equal(found, 2 * expected("deterministic:8", rows=rows))
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if "lora_shrink" in str(node.target)]
    assert called == [f"{operator.namespace}.lora_shrink"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.update(inputs=c["inputs"].float()), "inputs' dtype torch.float32"),
        (lambda c: c.update(lora_a_weights=[]), "lora_a_weights must"),
        (
            lambda c: c.update(lora_a_weights=[w.squeeze(1) for w in c["lora_a_weights"]]),
            r"contiguous \[adapters, 1, R, K\]",
        ),
        (
            lambda c: c.update(
                lora_a_weights=[c["lora_a_weights"][0], *c["lora_a_weights"][:2]][::2]
            ),
            "output_tensor must be float32",
        ),
        (lambda c: c.update(output_tensor=c["output_tensor"].bfloat16()), "must be float32"),
        (lambda c: c.update(output_tensor=c["output_tensor"][:, :5]), "7 rows must have as many"),
        (
            lambda c: c.update(token_lora_mapping=c["token_lora_mapping"].long()),
            r"must be int32 \[rows\]; got torch.int64",
        ),
        (lambda c: c.update(token_lora_mapping=c["token_lora_mapping"][:3]), "got 7 and 3"),
        (
            lambda c: c.update(
                inputs=c["inputs"].float(), lora_a_weights=[w.float() for w in c["lora_a_weights"]]
            ),
            "bfloat16 or float16",
        ),
        (lambda c: c.update(inputs=c["inputs"][:, :64]), r"must be \[rows, 100\]"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(operators, change, match):
    """What vLLM asserts is checked here with words, before memory is touched."""
    operator = operators.define()
    installation = install(settings(), operator)
    x, weights, out, mapping = operators.tensors(**SHAPE)
    arguments = {
        "inputs": x,
        "lora_a_weights": weights,
        "output_tensor": out,
        "token_lora_mapping": mapping,
    }
    change(arguments)
    with pytest.raises(PluginError, match=match):
        installation.replacement(*arguments.values(), *operators.metadata(mapping, 2)[1:], 1.0)


def test_each_set_of_weights_is_checked_once_and_counted(operators, call):
    """One layer is one set of weights, however often it runs and with however many rows."""
    operator = operators.define()
    installation = install(settings(), operator)
    kept = [operators.tensors(**SHAPE, seed=seed) for seed in range(3)]
    for x, weights, out, mapping in [*kept, *kept]:
        operator.call(x, weights, out, *operators.metadata(mapping, 2), 1.0)
        operator.call(x[:2], weights, out[:, :2], *operators.metadata(mapping[:2], 2), 1.0)
    assert installation.replacement.layers == 3
    assert installation.replacement.launches() is None


def test_other_weights_at_the_same_address_are_checked(operators):
    """Memory that comes back with more adapters, or with weights that are no weights, is no old layer."""
    operator = operators.define()
    installation = install(settings(), operator)
    x, weights, out, mapping = operators.tensors(**SHAPE, seed=1)
    meta = operators.metadata(mapping.clamp(max=0), 2)
    operator.call(x, [weight[:1] for weight in weights], out, *meta, 1.0)
    operator.call(x, weights, out, *meta, 1.0)
    assert installation.replacement.layers == 2
    reshaped = [weight.view(2, 2, 4, 100) for weight in weights]
    with pytest.raises(PluginError, match="lora_a_weights must all be contiguous"):
        operator.call(x, reshaped, out, *meta, 1.0)
