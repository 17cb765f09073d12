"""`python -m fliptrace_kernels.bench`."""

from __future__ import annotations

import sys

from fliptrace_kernels.bench.command_line import main

if __name__ == "__main__":
    sys.exit(main())
