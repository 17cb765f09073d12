"""Labelled texts by way of the datasets library (Civil Comments and others); the only module that imports it.

What it downloads, and from where, is the library's own business; a folder that it saved, or one with data files, is
read without a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.labelled import LabelledText, labelled_texts


def read_labelled_dataset(
    name: str, split: str, text_column: str, label_column: str, threshold: float
) -> list[LabelledText]:
    """Read one split of a data set.

    Args:
        name: as the library knows it, ``OWNER/NAME`` or ``OWNER/NAME:CONFIGURATION``; a folder of data files, or one
            that save_to_disk wrote.
        split: one of the data set's, such as ``test``.
        text_column: what is judged.
        label_column: what is right; empty for none.
        threshold: from which number on a label is yes.

    Raises:
        InputError: the library is missing, or the data set, split or a column is not there, or a label is none.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"data set {name!r} is read by the library datasets, which is not installed: "
            "pip install 'fliptrace[studies]', or give a CSV file"
        ) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        found = _loaded(datasets, name, split)
    except Exception as error:
        # Which errors its loaders raise is not stated: the hub's, the builders', Arrow's and the file system's.
        said = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"data set {name!r}, split {split!r}, cannot be read ({type(error).__name__}: {said}); its name, "
            "configuration (NAME:CONFIGURATION) and split must be there"
        ) from error
    columns = [column for column in (text_column, label_column) if column]
    for column in columns:
        if column not in found.column_names:
            raise InputError(
                f"data set {name!r} has no column {column!r}; it has {', '.join(found.column_names)}"
            )
    texts = list(found[text_column])
    labels = list(found[label_column]) if label_column else [None] * len(texts)
    for number, text in enumerate(texts):
        if text is not None and not isinstance(text, str):
            raise InputError(
                f"data set {name!r}, row {number}: column {text_column!r} must hold texts; got {text!r}"
            )
    pairs = [(text or "", _word(label)) for text, label in zip(texts, labels, strict=True)]
    return labelled_texts(pairs, f"data set {name!r}", label_column, threshold)


def _loaded(datasets: Any, name: str, split: str) -> Any:
    folder = Path(name).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(folder))[split]
    if (folder / "state.json").is_file():  # it has no splits
        return datasets.load_from_disk(str(folder))
    if folder.exists():
        return datasets.load_dataset(str(folder), split=split)
    owner_and_name, _, configuration = name.partition(":")
    return datasets.load_dataset(owner_and_name, configuration or None, split=split)


def _word(label: Any) -> str:
    return "" if label is None else str(label)
