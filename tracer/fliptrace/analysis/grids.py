"""Gathers classes and magnitudes of all steps into the two grids that views draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.evidence import ROOT, StepEvidence
from fliptrace.analysis.largest import CELL_ELEMENTS, ROOT_ELEMENTS, Elements, picked
from fliptrace.analysis.roles import Role, role_of
from fliptrace.grids import Grid, LargestElements
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Site
from fliptrace.trace import StepRecord

Row = tuple[str, str | int]
_FIELDS = ("classes", "magnitudes", "ulps", "origins", "surviving")
_DTYPES = (torch.int8, torch.float32, torch.int64, torch.int8, torch.int32)


@dataclass
class _Cells:
    """One step's cells: rows, and [rows, columns] of every field.

    Attributes:
        starts: the first column, once per step that has these cells: a step, or in the prefill a position.
        first_position: absolute position of the first token row.
        largest: differing elements, None where nothing differs.
    """

    starts: list[int]
    rows: tuple[Row, ...]
    fields: tuple[Tensor, ...]
    first_position: int = 0
    largest: Elements | None = None


class GridBuilder:
    """Collects steps, then lays them out."""

    def __init__(self, rounded: torch.dtype) -> None:
        """Start empty.

        Args:
            rounded: the type that decides survival.
        """
        self._rounded = rounded
        self._cache_dtype = ""
        self._modules: tuple[list[_Cells], list[_Cells]] = ([], [])
        self._module_rows: dict[Row, None] = {}
        self._prefill: list[_Cells] = []
        self._decode: list[_Cells] = []
        self._rows: dict[Row, None] = {}
        self._row_lists: set[tuple[Row, ...]] = set()
        # Equal steps share their tensors: (classes, cells) by the identity of the classes.
        self._shared: dict[int, tuple[Tensor, list[_Cells]]] = {}

    def add(self, evidence: StepEvidence) -> None:
        """Take one step's cells."""
        known = self._shared.get(id(evidence.classes))
        if known is not None:
            for cells in known[1]:
                cells.starts.append(_start(evidence))
            return
        found = [_shrink_cells(evidence, self._rounded), *_cache_cells(evidence)]
        modules = _module_cells(evidence)
        if evidence.cache is not None:
            self._cache_dtype = evidence.cache.dtype
        for cells in modules:
            self._module_rows |= dict.fromkeys(cells.rows)
        for cells in found:
            if cells.rows not in self._row_lists:
                self._row_lists.add(cells.rows)
                self._rows |= dict.fromkeys(cells.rows)
        if evidence.step > 0:
            found = [_worst_row(cells) for cells in found]
            modules = [_worst_row(cells) for cells in modules]
            if evidence.equal:
                self._shared[id(evidence.classes)] = (evidence.classes, [*found, *modules])
        self._modules[evidence.step > 0].extend(modules)
        (self._decode if evidence.step > 0 else self._prefill).extend(found)

    def finish(self, steps: Sequence[StepRecord]) -> dict[str, Grid]:
        """Lay out the grids.

        Args:
            steps: the compared steps.
        """
        rows = _ordered(list(self._rows))
        prompt = steps[0] if steps else None
        columns = (
            tuple(range(prompt.first_position, prompt.first_position + self._prompt_rows(prompt)))
            if prompt
            else ()
        )
        decode = tuple(step.step for step in steps if step.step > 0)
        return {
            "prefill": _laid_out("prefill", rows, columns, self._prefill, self._cache_dtype),
            "decode": _laid_out("decode", rows, decode, self._decode, self._cache_dtype),
        }

    def finish_modules(self, grids: dict[str, Grid]) -> dict[str, Grid]:
        """Lay out the grids of module outputs, none where they were not recorded.

        Args:
            grids: what finish returned.
        """
        if not self._module_rows:
            return {}
        return {
            name: _laid_out(name, list(self._module_rows), grids[name].columns, found, "")
            for name, found in zip(("prefill", "decode"), self._modules, strict=True)
        }

    def _prompt_rows(self, prompt: StepRecord) -> int:
        return max([len(prompt.token_ids), *(cells.fields[0].shape[1] for cells in self._prefill)])


@lru_cache(maxsize=64)
def _labels(kind: str, names: tuple[str, ...] | tuple[int, ...]) -> tuple[Row, ...]:
    return tuple((kind, name) for name in names)


def _start(evidence: StepEvidence) -> int:
    return evidence.step if evidence.step > 0 else evidence.first_position


def _shrink_cells(evidence: StepEvidence, rounded: torch.dtype) -> _Cells:
    return _Cells(
        starts=[_start(evidence)],
        rows=_labels("shrink", evidence.keys),
        fields=(
            evidence.classes,
            evidence.magnitudes,
            evidence.ulps,
            evidence.origins,
            evidence.surviving,
        ),
        first_position=evidence.first_position,
        largest=_largest_of_shrinks(evidence, rounded),
    )


def _largest_of_shrinks(evidence: StepEvidence, dtype: torch.dtype) -> Elements | None:
    """Pick the elements of every differing shrink row.

    Args:
        evidence: the step, its shrink values still there.
        dtype: the type that the consumer rounds to.
    """
    parts = []
    for values in evidence.values:
        window = (values.sites, slice(values.offset, values.offset + values.reference.shape[1]))
        record, row = (evidence.latent[window] + evidence.surviving[window]).nonzero(as_tuple=True)
        one, other = values.reference[record, row], values.candidate[record, row]
        rows, columns = values.sites[record], row + values.offset
        root = (evidence.origins[rows, columns] == ROOT) & (evidence.surviving[rows, columns] > 0)
        limits = torch.where(root, ROOT_ELEMENTS, CELL_ELEMENTS)
        cell, index = picked(one, other, limits, dtype)
        parts.append(
            Elements(
                rows=rows[cell],
                columns=columns[cell],
                heads=torch.full_like(index, -1, dtype=torch.int32),
                indices=index.to(torch.int32),
                reference=one[cell, index].to(torch.float32),
                candidate=other[cell, index].to(torch.float32),
            )
        )
    return Elements.joined(parts)


def _cache_cells(evidence: StepEvidence) -> list[_Cells]:
    cache = evidence.cache
    if cache is None:
        return []
    found = []
    for which, name in enumerate(("key", "value")):
        counts = cache.counts[:, which]
        classes = torch.where(
            counts > 0, int(CoordinateClass.SURVIVING), int(CoordinateClass.EQUAL)
        )
        classes = torch.where(cache.known, classes, int(CoordinateClass.NOT_OBSERVED))
        if cache.unpaired:
            classes[list(cache.unpaired)] = int(CoordinateClass.STRUCTURAL)
        found.append(
            _Cells(
                starts=[_start(evidence)],
                rows=_labels(name, cache.layers),
                fields=(
                    classes.to(torch.int8),
                    cache.magnitudes[:, which],
                    cache.ulps[:, which],
                    torch.zeros_like(classes, dtype=torch.int8),
                    counts.to(torch.int32),
                ),
                first_position=evidence.first_position,
                largest=Elements.joined(cache.largest[which]),
            )
        )
        cache.largest[which].clear()
    return found


def _module_cells(evidence: StepEvidence) -> list[_Cells]:
    modules = evidence.modules
    if modules is None:
        return []
    nothing = torch.zeros_like(modules.classes)
    return [
        _Cells(
            starts=[_start(evidence)],
            rows=_labels("module", modules.keys),
            fields=(modules.classes, *(nothing.to(dtype) for dtype in _DTYPES[1:])),
        )
    ]


def _worst_row(cells: _Cells) -> _Cells:
    """Merge the token rows of a decode step into one column."""
    if cells.fields[0].shape[1] == 1:
        return cells
    classes, magnitudes, ulps, origins, surviving = cells.fields
    if not cells.rows:
        return _Cells(cells.starts, (), tuple(values[:, :1] for values in cells.fields))
    worst = classes.argmax(dim=1, keepdim=True)
    return _Cells(
        starts=cells.starts,
        rows=cells.rows,
        fields=(
            classes.amax(1, keepdim=True),
            magnitudes.amax(1, keepdim=True),
            ulps.amax(1, keepdim=True),
            origins.gather(1, worst),
            surviving.sum(1, keepdim=True).to(torch.int32),
        ),
        first_position=cells.first_position,
        largest=cells.largest,
    )


def _laid_out(
    phase: str, rows: list[Row], columns: tuple[int, ...], found: list[_Cells], cache_dtype: str
) -> Grid:
    shape = (len(rows), len(columns))
    fields = [torch.zeros(shape, dtype=dtype) for dtype in _DTYPES]
    fields[0].fill_(int(CoordinateClass.NOT_OBSERVED))
    places = {row: number for number, row in enumerate(rows)}
    column_of = {column: number for number, column in enumerate(columns)}
    together: dict[tuple[Row, ...], list[_Cells]] = {}
    for cells in found:
        if cells.rows:
            together.setdefault(cells.rows, []).append(cells)
    for labels, members in together.items():
        index = torch.tensor([places[row] for row in labels]).unsqueeze(1)
        at = torch.tensor([column for cells in members for column in _columns(cells, column_of)])
        for number, target in enumerate(fields):
            target[index, at] = torch.cat([_repeated(cells, number) for cells in members], dim=1)
    return Grid(
        phase=phase,
        rows=tuple(_labelled(row) for row in rows),
        columns=columns,
        largest=_largest(found, places, column_of, cache_dtype),
        **dict(zip(_FIELDS, fields, strict=True)),
    )


def _largest(
    found: list[_Cells], places: dict[Row, int], column_of: dict[int, int], cache_dtype: str
) -> LargestElements | None:
    """Gather the elements of all steps, cell after cell."""
    parts = []
    for cells in found:
        elements = cells.largest
        if elements is None:
            continue
        index = torch.tensor([places[row] for row in cells.rows])
        single = cells.fields[0].shape[1] == 1  # token rows of a decode step share its column
        column = column_of[cells.starts[0]] + (0 if single else elements.columns)
        parts.append(
            (
                (index[elements.rows] * len(column_of) + column).to(torch.int32),
                (cells.first_position + elements.columns).to(torch.int32),
                *(elements.heads, elements.indices, elements.reference, elements.candidate),
            )
        )
    if not parts:
        return None
    gathered = [torch.cat(values) for values in zip(*parts, strict=True)]
    order = gathered[0].argsort(stable=True)
    places_of, positions, heads, indices, one, other = (values[order] for values in gathered)
    return LargestElements(
        places_of, positions, heads, indices, one, other, cache_dtype=cache_dtype
    )


def _repeated(cells: _Cells, number: int) -> Tensor:
    """Return one field, once per step that has these cells."""
    values, times = cells.fields[number], len(cells.starts)
    return values if times == 1 else values.repeat(1, times)


def _columns(cells: _Cells, column_of: dict[int, int]) -> list[int]:
    """Return the columns of the grid that cells go to, step after step."""
    width = cells.fields[0].shape[1]
    starts = [column_of[start] for start in cells.starts]
    return starts if width == 1 else [start + at for start in starts for at in range(width)]


def _labelled(row: Row) -> tuple[str, Site | int]:
    kind, name = row
    return (kind, site_of(name)) if isinstance(name, str) else (kind, name)


def _ordered(rows: list[Row]) -> list[Row]:
    """Put shrink rows in execution order and every cache row where its layer writes its cache."""
    shrinks = [row for row in rows if isinstance(row[1], str)]
    sites = [site_of(str(row[1])) for row in shrinks]
    cached = sorted({row[1] for row in rows if isinstance(row[1], int)})
    if not cached:  # no cache was recorded: its rows stay, as not observed
        cached = sorted({site.layer for site in sites if site.layer is not None})
        rows = [*rows, *((kind, layer) for layer in cached for kind in ("key", "value"))]
    present = set(rows)
    inserted: dict[int, list[Row]] = {}
    for layer in cached:
        pair: list[Row] = [(kind, layer) for kind in ("key", "value") if (kind, layer) in present]
        inserted.setdefault(cache_place(sites, layer), []).extend(pair)
    ordered: list[Row] = []
    for number in range(len(shrinks) + 1):
        ordered.extend(inserted.get(number, ()))
        ordered.extend(shrinks[number : number + 1])
    return ordered


def cache_place(sites: Sequence[Site], layer: int) -> int:
    """Return before which of the sites (in execution order) a layer writes its cache.

    After its last site that makes keys or values; else before its first site; else before the next layer's.
    """
    writers = [
        number
        for number, site in enumerate(sites)
        if site.layer == layer and role_of(site) in (Role.KEY, Role.VALUE, Role.ATTENTION_IN)
    ]
    if writers:
        return writers[-1] + 1
    later = (
        number
        for number, site in enumerate(sites)
        if site.layer is not None and site.layer >= layer
    )
    return next(later, len(sites))
