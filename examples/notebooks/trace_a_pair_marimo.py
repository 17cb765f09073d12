"""Trace a pair, as a marimo notebook: open it with `marimo edit`, or run it with python."""

from __future__ import annotations

import marimo

app = marimo.App()


@app.cell
def introduction():
    import marimo as mo

    mo.md("""
    # Trace a pair

    Two greedy executions of one prompt, equal in everything but the order in which partial sums of the LoRA shrinks
    are added. This runs on the CPU with the model that ships with the package; arrival orders are simulated.
    """)
    return (mo,)


@app.cell
def record():
    import torch

    import fliptrace as ft
    from fliptrace.views.progress import progress_bar

    torch.set_num_threads(1)  # the bundled model is small: more threads only wait for each other
    bundled = ft.bundled_model()
    engine = ft.load_engine(bundled.model, bundled.adapter, device="cpu")
    with progress_bar() as show:
        pair = ft.trace_pair(
            engine,
            prompt=bundled.prompts[36].text,
            reduction="atomic:8",
            attempts=4,
            max_new_tokens=48,
            progress=show,
        )
    return (pair,)


@app.cell
def verdict(pair):
    pair
    return


@app.cell
def where_it_started(pair):
    pair.divergence
    return


@app.cell
def heatmap(pair):
    figure = pair.heatmap("prefill")
    figure
    return


if __name__ == "__main__":
    app.run()
