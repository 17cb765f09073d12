"""What all pictures share: sizes, type, and files that are equal byte for byte when they are drawn again.

Pictures are matplotlib figures made without pyplot, so that nothing is registered, no window opens and no backend is
chosen for the rest of the program. A person's own matplotlib settings do not reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from fliptrace.errors import InputError, StorageError
from fliptrace.views.escaping import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Widths in inches of one column and of both columns of a two-column paper.
COLUMN, PAGE = 3.4, 7.0
FORMATS = ("svg", "pdf", "png")

_PNG_DPI = 300
#: Resolution of the cells of a heatmap inside svg and pdf.
_RASTER_DPI = 600
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 7.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.0,
    "ytick.labelsize": 6.0,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.0,
    "hatch.linewidth": 0.4,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "image.interpolation": "nearest",
    "text.parse_math": False,  # a token may hold $
    "text.usetex": False,
    "pdf.fonttype": 42,  # TrueType, embedded: what journals ask for
    "svg.fonttype": "path",
    "svg.hashsalt": "fliptrace",
}
#: No dates, no versions, no paths.
_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": "fliptrace"},
    "pdf": {"CreationDate": None, "Creator": "fliptrace", "Producer": None},
    "png": {"Software": "fliptrace"},
}

_Arguments = ParamSpec("_Arguments")


def styled(draw: Callable[_Arguments, Figure]) -> Callable[_Arguments, Figure]:
    """Let a function draw in this module's style, whatever matplotlib is set to elsewhere."""

    @wraps(draw)
    def drawing(*given: _Arguments.args, **named: _Arguments.kwargs) -> Figure:
        import matplotlib.style

        with matplotlib.style.context(["default", _STYLE]):
            return draw(*given, **named)

    return drawing


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of a size in inches, which arranges its own axes."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_picture(figure: Figure, path: str | Path) -> Path:
    """Write a picture into one file; the same figure gives the same bytes.

    Args:
        figure: from one of the functions of this package.
        path: ends in ``.svg``, ``.pdf`` or ``.png``.

    Raises:
        InputError: another ending.
        StorageError: the file cannot be written.
    """
    import matplotlib.style

    place = Path(path)
    kind = place.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(
            f"a picture's name ends in one of {', '.join('.' + name for name in FORMATS)}; got {place.name!r}"
        )
    dpi = _PNG_DPI if kind == "png" else _RASTER_DPI
    try:
        with matplotlib.style.context(["default", _STYLE]):
            figure.savefig(place, format=kind, dpi=dpi, metadata=_METADATA[kind])
    except OSError as error:
        raise StorageError(f"the picture {place} cannot be written ({error})") from error
    return place


def parse_formats(text: str) -> tuple[str, ...]:
    """Read a list of formats: ``svg,png,pdf``.

    Raises:
        InputError: a name that is none of them, or none at all.
    """
    names = [word.strip().lower() for word in text.replace(" ", ",").split(",") if word.strip()]
    wrong = [name for name in names if name not in FORMATS]
    if wrong or not names:
        raise InputError(
            f"figures are written as {', '.join(FORMATS)}, separated by commas; got {text!r}"
        )
    return tuple(dict.fromkeys(names))


def drawable(text: str) -> str:
    """Return a text with every character that the font can draw; others become ``□``."""
    seen = visible(text)
    if seen.isascii():
        return seen
    known = _glyphs()
    return "".join(character if ord(character) in known else "□" for character in seen)


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
