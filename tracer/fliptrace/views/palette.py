"""Colours of the five classes, light and dark, in one place for figures, page and terminal.

From Okabe and Ito's colour-blind-safe set; tests/views measures how far apart they stay under simulated colour
blindness. Not observed has no colour: the cell is left open and hatched. Magnitudes use a
scale without grays, so that none looks equal.
"""

from __future__ import annotations

from fliptrace.numerics import CoordinateClass

#: Class -> colour, per theme.
CLASS_COLOURS: dict[str, dict[CoordinateClass, str]] = {
    "light": {
        CoordinateClass.EQUAL: "#cfd3d8",
        CoordinateClass.LATENT: "#56b4e9",
        CoordinateClass.SURVIVING: "#d55e00",
        CoordinateClass.STRUCTURAL: "#332288",
    },
    "dark": {
        CoordinateClass.EQUAL: "#4a5058",
        CoordinateClass.LATENT: "#56b4e9",
        CoordinateClass.SURVIVING: "#f0791a",
        CoordinateClass.STRUCTURAL: "#f0e442",
    },
}

#: Lines, texts and hatching of figures, per theme.
INK = {
    "light": {"text": "#1d2329", "muted": "#5a6570", "grid": "#dde1e6", "hatch": "#9aa3ad"},
    "dark": {"text": "#e8ebee", "muted": "#a3adb8", "grid": "#343b43", "hatch": "#6d7782"},
}

#: The two executions and the boundary, in lines and markers.
EXECUTION_COLOURS = {
    "light": {"reference": "#0072b2", "candidate": "#d55e00", "boundary": "#1d2329"},
    "dark": {"reference": "#56b4e9", "candidate": "#f0791a", "boundary": "#e8ebee"},
}

#: Colours of the magnitudes, small to large.
MAGNITUDE_SCALE = "Viridis"

CLASS_MEANINGS = {
    CoordinateClass.EQUAL: "all bits agree",
    CoordinateClass.LATENT: "FP32 bits differ, equal after rounding",
    CoordinateClass.SURVIVING: "still different after rounding (K and V: bits differ)",
    CoordinateClass.STRUCTURAL: "shape, dtype or partner missing",
    CoordinateClass.NOT_OBSERVED: "not recorded: nothing is known",
}


def class_scale(theme: str = "light") -> list[list[float | str]]:
    """Return plotly's stepped colour scale for class values 0 to 3 with ``zmin=-0.5, zmax=3.5``."""
    scale: list[list[float | str]] = []
    colours = CLASS_COLOURS[theme]
    for number, label in enumerate(
        (
            CoordinateClass.EQUAL,
            CoordinateClass.LATENT,
            CoordinateClass.SURVIVING,
            CoordinateClass.STRUCTURAL,
        )
    ):
        scale += [[number / 4, colours[label]], [(number + 1) / 4, colours[label]]]
    return scale


def dark_twins() -> dict[str, str]:
    """Map every colour of the light theme to its twin in the dark one, to recolour a finished figure."""
    twins = {light: CLASS_COLOURS["dark"][label] for label, light in CLASS_COLOURS["light"].items()}
    for colours in (INK, EXECUTION_COLOURS):
        twins |= {light: colours["dark"][name] for name, light in colours["light"].items()}
    return twins
