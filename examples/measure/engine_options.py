"""The options of measuring scripts that load an engine, and the loading."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import fliptrace as ft

if TYPE_CHECKING:
    from fliptrace.pair.engines import LoadedEngine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add --engine, --device, --attention and --vllm-arguments."""
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument(
        "--vllm-arguments", type=json.loads, default=None, help="JSON: further arguments of LLM"
    )


def load_engine(model: str, adapter: str, options: argparse.Namespace) -> LoadedEngine:
    """Load what the options say."""
    return ft.load_engine(
        model,
        adapter,
        engine=options.engine,
        device=options.device,
        attention=options.attention,
        vllm_arguments=options.vllm_arguments,
    )
