"""One vLLM engine in a process of its own that does what it is told, line by line.

    python examples/measure/vllm_engine.py '{"options": {"model": ...}, "adapters": [...]}'

Started by vllm_shrink.py and vllm_checks.py, some of whose engines must not see fliptrace_kernels; what it does is in
fliptrace.studies.engine_process_vllm.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tracer"))

from fliptrace.studies.engine_process_vllm import main

if __name__ == "__main__":
    main()
