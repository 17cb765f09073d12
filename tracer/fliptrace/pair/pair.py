"""Two traces and what their comparison found."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fliptrace.analysis import compare, separate_all
from fliptrace.displays import show_with
from fliptrace.errors import InputError, StorageError
from fliptrace.pair.divergence import Divergence
from fliptrace.store import copy_trace, open_trace
from fliptrace.trace import Trace
from fliptrace.verdicts import Outcome, PairDiff

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

REFERENCE_NAME = "reference.trace"
CANDIDATE_NAME = "candidate.trace"
REPORT_NAME = "report.html"
DOCUMENT_NAME = "report.json"


class Pair:
    """A reference and a candidate execution, compared.

    Attributes:
        reference: the first trace; candidate: the second.
        diff: everything that the comparison found.
        attempts: how many candidates ran before this one was kept, itself included; None for stored pairs.
    """

    def __init__(
        self,
        reference: Trace,
        candidate: Trace,
        *,
        attempts: int | None = None,
        rounded_dtype: str | None = None,
        temporary: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        across_engines: bool = False,
    ) -> None:
        """Compare two traces.

        Args:
            reference: an open trace.
            candidate: another, of the same prompt and model.
            attempts: for the record.
            rounded_dtype: decide survival at another type's boundary than the model's.
            temporary: the folder that holds the traces; it is removed when the pair is closed or forgotten.
            progress: told (steps done, steps in all) while comparing.
            across_engines: compare traces of two engines, too; see compare.

        Raises:
            TraceMismatchError: the traces cannot be compared.
        """
        self.reference = reference
        self.candidate = candidate
        self.attempts = attempts
        # A notebook may change its working directory before it saves.
        self._files = tuple(Path(trace.name).absolute() for trace in (reference, candidate))
        self._forget_folder = (
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            if temporary is not None
            else None
        )
        self.diff: PairDiff = compare(
            reference,
            candidate,
            rounded_dtype=rounded_dtype,
            progress=progress,
            across_engines=across_engines,
        )

    def separate(self, weights: Mapping[str, Tensor]) -> None:
        """Tell what every shrink added from what it inherited, for the report; nothing where operands were not kept.

        Args:
            weights: the adapter's A by site path, [R, K], as shrink_weights returns them.

        Raises:
            InputError: a weight does not fit.
        """
        self.diff = separate_all(self.diff, self.reference, self.candidate, weights)

    @property
    def diverged(self) -> bool:
        """True when the executions chose different tokens."""
        return self.diff.outcome is Outcome.TOKEN

    @property
    def divergence(self) -> Divergence | None:
        """The first surviving difference: of a root that propagates, else of any root, else of a variant.

        None where no root and no variant survives.
        """
        diff = self.diff
        row = diff.first_propagating or diff.first_surviving or diff.first_surviving_variant
        return None if row is None else Divergence.of(row)

    def heatmap(self, phase: str = "prefill", colour: str = "class") -> Figure:
        """Draw the differences.

        Args:
            phase: ``prefill`` (columns are prompt positions) or ``decode`` (columns are steps).
            colour: ``class`` or ``magnitude``.
        """
        from fliptrace.views import heatmap_figure

        return heatmap_figure(self.diff, phase=phase, colour=colour, reference=self.reference)

    def summary(self) -> str:
        """Return the story in plain text."""
        from fliptrace.views import plain_summary

        return plain_summary(self.diff, self.reference, self.candidate)

    def to_json(self, command: str | None = None) -> dict[str, Any]:
        """Return what report.json holds."""
        from fliptrace.views import report_json

        return report_json(self.diff, self.reference, self.candidate, command=command)

    def save(self, directory: str | Path, *, command: str | None = None) -> Path:
        """Write report.html, report.json and the two traces into a new folder, all of it or nothing.

        Args:
            directory: must not exist, or be empty.
            command: how the pair was made, for the report.

        Returns:
            The path of report.html.

        Raises:
            InputError: the folder is not empty.
            StorageError: it cannot be written.
        """
        target = Path(directory).resolve()
        require_new(target)
        scratch: Path | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            for file, name in zip(self._files, (REFERENCE_NAME, CANDIDATE_NAME), strict=True):
                copy_trace(file, scratch / name)
            self.write_report(scratch, command=command)
            scratch.chmod(0o755)
            move_into_place(scratch, target)
        except OSError as error:
            raise StorageError(
                f"the pair could not be saved to {target} ({error}); nothing was written"
            ) from error
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)  # gone already when all went well
        return target / REPORT_NAME

    def write_report(self, directory: str | Path, *, command: str | None = None) -> Path:
        """Write report.html and report.json into an existing folder; return the page's path.

        Raises:
            StorageError: they cannot be written.
        """
        from fliptrace.views import render_report

        folder = Path(directory)
        page = render_report(
            self.diff, self.reference, self.candidate, title=self.title, command=command
        )
        document = json.dumps(self.to_json(command), indent=1, ensure_ascii=True, allow_nan=False)
        try:
            (folder / REPORT_NAME).write_text(page, "utf-8")
            (folder / DOCUMENT_NAME).write_text(document + "\n", "utf-8")
        except OSError as error:
            raise StorageError(f"the report could not be written to {folder} ({error})") from error
        return folder / REPORT_NAME

    @property
    def title(self) -> str:
        """The report's title."""
        manifest = self.reference.manifest
        return f"{manifest.get('model.name', 'model')} + {manifest.get('adapter.name', 'adapter')}"

    def close(self) -> None:
        """Close both traces and forget a temporary folder."""
        self.reference.close()
        self.candidate.close()
        if self._forget_folder is not None:
            self._forget_folder()

    def __enter__(self) -> Pair:
        """Close on leaving."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close both traces."""
        self.close()

    def __repr__(self) -> str:
        """Say the verdict in one line."""
        flip = self.diff.flip
        where = f", generated token {flip.step + 1}" if flip else ""
        origin = (
            f", first surviving difference at {self.divergence.name}" if self.divergence else ""
        )
        return f"Pair({self.title}: {self.diff.outcome}{where}{origin})"

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        from fliptrace.views import pair_html

        return pair_html(self.diff, self.reference, self.candidate)


def _trace_html(trace: Trace) -> str:
    from fliptrace.views import trace_html

    return trace_html(trace)


def _diff_html(diff: PairDiff) -> str:
    from fliptrace.views import diff_html

    return diff_html(diff)


show_with(Trace, _trace_html)
show_with(PairDiff, _diff_html)


def diff_traces(
    reference: str | Path,
    candidate: str | Path,
    *,
    rounded_dtype: str | None = None,
    across_engines: bool = False,
) -> Pair:
    """Compare two stored traces; no model is needed.

    Args:
        reference: a trace file.
        candidate: another, of the same prompt and model.
        rounded_dtype: decide survival at the boundary of ``bfloat16``, ``float16`` or ``float32`` instead of at that
            of the model's type.
        across_engines: compare traces of two engines, too; see compare.

    Raises:
        TraceReadError: one of them cannot be read.
        TraceMismatchError: they cannot be compared.
    """
    with contextlib.ExitStack() as on_error:
        first = on_error.enter_context(open_trace(reference))
        second = on_error.enter_context(open_trace(candidate))
        pair = Pair(first, second, rounded_dtype=rounded_dtype, across_engines=across_engines)
        on_error.pop_all()
    return pair


def load_pair(directory: str | Path) -> Pair:
    """Open a folder that ``save`` or trace-pair wrote.

    Raises:
        TraceReadError: a trace is missing or cannot be read.
    """
    folder = Path(directory)
    return diff_traces(folder / REFERENCE_NAME, folder / CANDIDATE_NAME)


def require_new(directory: Path) -> None:
    """Refuse a folder that exists and is not empty, and the working directory, which a new folder would replace.

    Raises:
        InputError: it is not empty, or no folder.
    """
    try:
        # A new name followed by .. does not exist, but what it leads to may.
        target = directory.resolve()
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise InputError(
            f"output folder {directory} cannot be looked into ({error}); name a new one"
        ) from error
    if taken:
        raise InputError(
            f"output folder {directory} exists and is not empty; name a new one, nothing was changed"
        )
    if target == Path.cwd():
        raise InputError("the output folder is the working directory; name a new one inside it")


def move_into_place(scratch: Path, target: Path) -> None:
    """Let a finished folder take its place in one step; an empty folder of that name gives way.

    Where that folder is a mount point, which cannot be replaced, its contents are moved one by one, the page last.

    Raises:
        OSError: it cannot be moved.
    """
    try:
        scratch.replace(target)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        for path in sorted(scratch.iterdir(), key=lambda path: (path.suffix == ".html", path.name)):
            shutil.move(path, target / path.name)
        scratch.rmdir()
