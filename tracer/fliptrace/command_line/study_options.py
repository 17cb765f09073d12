"""The options that the studies share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fliptrace.command_line.options import MODEL, OUTPUT, PROMPT, DtypeName, EngineName

STUDY = "Study"

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="The base model: a folder, a .gguf file or a hub name; the bundled one if left out.",
        metavar="MODEL",
        rich_help_panel=MODEL,
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        help="Its LoRA adapter in safetensors: a folder or a hub name.",
        metavar="ADAPTER",
        rich_help_panel=MODEL,
    ),
]
EngineOption = Annotated[
    EngineName, typer.Option(help="What runs the model.", rich_help_panel=MODEL)
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto (CUDA when there is one), cpu, cuda or cuda:N.",
        metavar="DEVICE",
        rich_help_panel=MODEL,
    ),
]
#: Other studies have --device, so people type it here.
NoDeviceOption = Annotated[str, typer.Option(hidden=True)]
DtypeOption = Annotated[
    DtypeName, typer.Option(help="The type in which the model computes.", rich_help_panel=MODEL)
]
AttentionOption = Annotated[
    str,
    typer.Option(
        help="sdpa or eager; with --engine vllm the name of its backend, such as TRITON_ATTN (sdpa leaves it to vLLM).",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(help="Threads of torch, on a CPU.", metavar="N", rich_help_panel=MODEL),
]
NoTemplateOption = Annotated[
    bool,
    typer.Option(
        "--no-chat-template",
        help="Use prompts as they are, without the model's chat template.",
        rich_help_panel=PROMPT,
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(
        help="Where prompts come from: bundled, gsm8k:PATH (fields question, answer), mbpp:PATH (its test split), "
        "jsonl:PATH (fields prompt and, if scored, answer), lm-eval:PATH or inspect:PATH (logs of these harnesses).",
        metavar="TASK",
        rich_help_panel=PROMPT,
    ),
]
SelectOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Rows, from 0: --select 0 5 10-19. Without it rows are drawn.",
        metavar="ROWS",
        rich_help_panel=PROMPT,
    ),
]
PromptsOption = Annotated[
    int | None,
    typer.Option(help="How many prompts.", metavar="N", rich_help_panel=PROMPT),
]
PromptSeedOption = Annotated[
    int,
    typer.Option(help="Seed of the draw.", metavar="N", rich_help_panel=PROMPT),
]
ReductionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reduction",
        help="How LoRA shrinks sum; repeat the option for several.",
        metavar="KIND:SPLITS",
        rich_help_panel=STUDY,
    ),
]
RepetitionsOption = Annotated[
    int,
    typer.Option(help="Of each prompt and reduction.", metavar="N", rich_help_panel=STUDY),
]
SeedOption = Annotated[
    int,
    typer.Option(
        help="Where schedule seeds begin, where atomics are simulated (CPU).",
        metavar="N",
        rich_help_panel=STUDY,
    ),
]
FolderOption = Annotated[
    Path,
    typer.Option(
        "--out",
        help="The study's folder: new, or one that the same study has begun; finished rows are kept.",
        metavar="FOLDER",
        rich_help_panel=OUTPUT,
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        help="Begin no more work after so many minutes; run the same command again to go on. 0 writes the report of "
        "what is there.",
        metavar="MINUTES",
        rich_help_panel=STUDY,
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        help="Spread the work with Ray: on this machine, or at an address (auto, HOST:PORT).",
        metavar="[ADDRESS]",
        rich_help_panel=STUDY,
    ),
]
RayWorkersOption = Annotated[
    int | None,
    typer.Option(
        help="How many workers; one per GPU, or two, if left out.",
        metavar="N",
        rich_help_panel=STUDY,
    ),
]
#: Its file is read before the command line is parsed.
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file with options by name; what is typed goes before it.",
        metavar="FILE",
        rich_help_panel=STUDY,
    ),
]
SummaryJsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print summary.json instead of the table.", rich_help_panel=OUTPUT),
]
ModeOption = Annotated[
    str,
    typer.Option(
        help="graphs (decoding from CUDA graphs), compiled (as vLLM has it), eager; auto is graphs on CUDA, eager on "
        "the CPU.",
        metavar="MODE",
        rich_help_panel=MODEL,
    ),
]
ServedModeOption = Annotated[
    str,
    typer.Option(
        help="With --engine vllm: graphs, compiled or eager, each reduction on an engine of its own as vLLM serves it; "
        "in-process, stepped and read by fliptrace, eager. auto is graphs on CUDA, in-process on the CPU.",
        metavar="MODE",
        rich_help_panel=MODEL,
    ),
]
ServedBatchOption = Annotated[
    int,
    typer.Option(
        help="Requests at once, on an engine of vLLM's own; the paper's protocol is 1.",
        metavar="N",
        rich_help_panel=STUDY,
    ),
]
BatchInvariantOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Values of VLLM_BATCH_INVARIANT, off and on; repeat the option.",
        metavar="SWITCH",
        rich_help_panel=STUDY,
    ),
]
BatchSizesOption = Annotated[
    list[int] | None,
    typer.Option(help="Requests at once; repeat the option.", metavar="N", rich_help_panel=STUDY),
]
BackendOption = Annotated[
    str,
    typer.Option(
        help="vLLM's name of an attention backend; its own choice if left out.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
CacheOption = Annotated[
    float,
    typer.Option(
        help="Cache of each engine; several share one GPU.", metavar="GIB", rich_help_panel=MODEL
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        help="Longest request, in tokens; the model's if left out.",
        metavar="N",
        rich_help_panel=MODEL,
    ),
]
BatchedTokensOption = Annotated[
    int,
    typer.Option(
        help="Tokens of one forward, at most; a prompt beyond it is cut in two.",
        metavar="N",
        rich_help_panel=MODEL,
    ),
]
EnginePythonOption = Annotated[
    Path | None,
    typer.Option(
        help="The Python that has vLLM; this one if left out.",
        metavar="PYTHON",
        rich_help_panel=MODEL,
    ),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        help="Where logs and caches of the engines go; a folder for temporary files if left out.",
        metavar="FOLDER",
        rich_help_panel=MODEL,
    ),
]
StartOption = Annotated[
    float,
    typer.Option(
        help="How long an engine may take to start.", metavar="SECONDS", rich_help_panel=MODEL
    ),
]
SplitOption = Annotated[
    str | None,
    typer.Option(
        help="Of a data set of the datasets library; test (train: train) if left out.",
        metavar="NAME",
        rich_help_panel=PROMPT,
    ),
]
QuestionOption = Annotated[
    str,
    typer.Option(help="Asked of every text.", metavar="TEXT", rich_help_panel=PROMPT),
]
TextColumnOption = Annotated[
    str,
    typer.Option(
        help="Of labelled texts: the column to judge.", metavar="NAME", rich_help_panel=PROMPT
    ),
]
LabelColumnOption = Annotated[
    str,
    typer.Option(
        help="Of labelled texts: what is right: yes, no, true, false, or a number. Empty: no labels.",
        metavar="NAME",
        rich_help_panel=PROMPT,
    ),
]
ThresholdOption = Annotated[
    float,
    typer.Option(help="From which number on a label is yes.", metavar="X", rich_help_panel=PROMPT),
]
YesOption = Annotated[
    str,
    typer.Option(
        help="The answer for yes; a decision is read from its first token.",
        metavar="WORD",
        rich_help_panel=PROMPT,
    ),
]
NoOption = Annotated[
    str,
    typer.Option(help="The same for no.", metavar="WORD", rich_help_panel=PROMPT),
]
