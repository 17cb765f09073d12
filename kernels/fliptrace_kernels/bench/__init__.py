"""How long shrinks take: one table on any CUDA machine, filled over as many sittings as it takes.

    python -m fliptrace_kernels.bench

What is timed and against what is in `variants`; how, in `timing`. Nothing here is imported by the
rest of the package.
"""

from __future__ import annotations
