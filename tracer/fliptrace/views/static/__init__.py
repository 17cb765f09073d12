"""Static pictures for papers and tickets: svg, pdf and png, drawn by matplotlib without a browser or a display.

The counterparts of the paper's figures 3 to 6, and predictions against what came. matplotlib is imported here only, and
only when a picture is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.lazy import lazy_names

if TYPE_CHECKING:
    from fliptrace.views.static.boundary import boundary_picture
    from fliptrace.views.static.canvas import COLUMN, FORMATS, PAGE, parse_formats, write_picture
    from fliptrace.views.static.files import write_figures
    from fliptrace.views.static.heatmap import heatmap_picture
    from fliptrace.views.static.latency import latency_picture, latency_ratios
    from fliptrace.views.static.reliability import reliability_picture
    from fliptrace.views.static.replay import replay_picture

_HOMES = {
    "COLUMN": "canvas",
    "FORMATS": "canvas",
    "PAGE": "canvas",
    "boundary_picture": "boundary",
    "heatmap_picture": "heatmap",
    "latency_picture": "latency",
    "latency_ratios": "latency",
    "parse_formats": "canvas",
    "reliability_picture": "reliability",
    "replay_picture": "replay",
    "write_figures": "files",
    "write_picture": "canvas",
}

__all__ = [
    "COLUMN",
    "FORMATS",
    "PAGE",
    "boundary_picture",
    "heatmap_picture",
    "latency_picture",
    "latency_ratios",
    "parse_formats",
    "reliability_picture",
    "replay_picture",
    "write_figures",
    "write_picture",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
