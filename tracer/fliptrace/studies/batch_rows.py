"""Which module of a vLLM model first makes a request's rows depend on its neighbours in the batch.

Runs inside an eager engine's process. Every row that a module or a LoRA shrink puts out is reduced to a 64-bit digest,
for a batch and then for each request alone. A row that a request has alone must occur among the rows that the same
module put out for the batch; the first that does not, in the order of execution, is where that request's result began
to depend on its neighbours. Digests of equal rows are equal, so what is named differs; that nothing differs is as sure
as 64 bits are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Continues prompts greedily, at once, and returns the token ids of each.
Run = Callable[[list[list[int]]], list[list[int]]]
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Rows:
    """What modules put out, as digests of rows, in the order of execution."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._calls: list[tuple[str, Tensor]] = []
        self._factors: dict[int, Tensor] = {}

    def keep(self, name: str, values: Tensor) -> None:
        """Add a tensor [rows, ...] of a 16- or 32-bit floating type."""
        if (
            not values.is_floating_point()
            or values.element_size() not in _INTEGERS
            or not values.ndim
        ):
            return
        rows = values.detach().reshape(values.shape[0], -1)
        integers = rows.contiguous().view(_INTEGERS[rows.element_size()])
        width = integers.shape[1]
        if width not in self._factors:
            draw = torch.Generator().manual_seed(width)
            factors = torch.randint(-(2**62), 2**62, (width,), generator=draw) | 1
            self._factors[width] = factors.to(values.device)
        self._calls.append((name, (integers.long() * self._factors[width]).sum(1)))

    def taken(self) -> list[tuple[str, list[int]]]:
        """Return what was kept since the last time."""
        found = [(name, digests.tolist()) for name, digests in self._calls]
        self._calls = []
        return found


class _Operations(TorchDispatchMode):
    """Notes the operators that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def first_dependent_modules(
    model: nn.Module, prompts: Sequence[list[int]], alone: int, run: Run
) -> list[dict[str, Any]]:
    """Run prompts in one batch, then the first few alone, and compare what every module put out.

    Args:
        model: of an eager engine in this process that runs nothing else.
        prompts: token ids, all of them with the same adapter.
        alone: how many of them to run alone.
        run: continues prompts.

    Returns:
        One entry per prompt that ran alone: ``request``, ``same_tokens``, ``calls`` (how many were compared), and of
        the first that differs ``module``, ``kind`` (its class; ``shrink``, or its ``operand``), ``step`` (0 is the
        prefill) and ``operations`` (operators that ran in it); these are None without one.
    """
    rows = Rows()
    with watched(model, rows):
        together = run(list(prompts))
        batch: dict[str, set[int]] = {}
        for name, digests in rows.taken():
            batch.setdefault(name, set()).update(digests)
        found = []
        for number in range(min(alone, len(prompts))):
            (tokens,) = run([prompts[number]])
            calls = rows.taken()
            first = first_difference(calls, batch)
            found.append(
                {
                    "request": number,
                    "same_tokens": tokens == together[number],
                    "calls": len(calls),
                    "module": None,
                    "kind": None,
                    "step": None,
                    "operations": None,
                    **(first or {}),
                }
            )
    modules = dict(model.named_modules())
    names = {entry["module"] for entry in found if entry["module"]}
    ran: dict[str, list[str]] = {}
    for name in sorted(names & modules.keys()):
        try:
            ran[name] = operations_of(modules[name], lambda: run([prompts[0]]))
        except Exception as error:  # noqa: BLE001  (the module is known all the same)
            ran[name] = [f"not seen: {error}"]
    for entry in found:
        name = entry["module"]
        if name is not None:
            of_shrink = name.rpartition(".")[
                2
            ]  # what is no module is a layer's shrink or its operand
            entry["kind"] = type(modules[name]).__name__ if name in modules else of_shrink
        entry["operations"] = ran.get(name)
    return found


def first_difference(
    calls: Sequence[tuple[str, Sequence[int]]], batch: dict[str, set[int]]
) -> dict[str, Any] | None:
    """Return the first call with a row that the batch does not have, None where there is none.

    Args:
        calls: module and digests of rows, in the order of execution; the first module begins a forward.
        batch: per module, the digests of all rows of the batch.
    """
    step = -1
    for name, digests in calls:
        step += name == calls[0][0]
        if any(digest not in batch.get(name, ()) for digest in digests):
            # A module's second output is compared too, and is no module of its own.
            return {"module": name.partition("[")[0], "step": step, "rows": len(digests)}
    return None


@contextlib.contextmanager
def watched(model: nn.Module, rows: Rows) -> Iterator[None]:
    """Keep what every module and every LoRA shrink puts out, while inside."""
    handles = [
        module.register_forward_hook(_keeper(name, rows))
        for name, module in model.named_modules()
        if name
    ]
    layers: dict[int, str] = {}
    for name, module in model.named_modules():
        stacked = getattr(module, "lora_a_stacked", None)
        if stacked is not None:
            first = stacked if isinstance(stacked, Tensor) else stacked[0]
            layers[first.data_ptr()] = name
    wrappers: dict[int, Any] = {
        id(module.punica_wrapper): module.punica_wrapper
        for module in model.modules()
        if getattr(module, "punica_wrapper", None) is not None
    }
    for wrapper in wrappers.values():
        wrapper.add_shrink = _shrink_keeper(wrapper.add_shrink, layers, rows)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for wrapper in wrappers.values():
            vars(wrapper).pop("add_shrink", None)


def _keeper(name: str, rows: Rows) -> Any:
    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                rows.keep(f"{name}[{number}]" if number else name, tensor)

    return after


def _shrink_keeper(own: Callable[..., Any], layers: dict[int, str], rows: Rows) -> Any:
    def add_shrink(y: Any, x: Tensor, weights: Sequence[Tensor], *rest: Any, **named: Any) -> Any:
        layer = layers.get(weights[0].data_ptr(), "unknown layer")
        rows.keep(f"{layer}.operand", x.reshape(-1, x.shape[-1]))
        result = own(y, x, weights, *rest, **named)
        whole = y if isinstance(y, Tensor) else torch.stack(tuple(y))
        rows.keep(f"{layer}.shrink", whole.transpose(0, 1))
        return result

    return add_shrink


def operations_of(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Return the operators that a module's first call runs, in their order.

    Args:
        module: called at least once by ``run``.
        run: anything that runs the model.
    """
    noted = _Operations()
    inside = contextlib.ExitStack()
    done: list[bool] = []

    def before(_module: nn.Module, _inputs: Any) -> None:
        if not done:
            done.append(True)
            inside.enter_context(noted)

    def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        inside.close()

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        run()
    finally:
        inside.close()
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(noted.names))
