"""Where a non-finite number first appeared, so that a skipped step says more than that it was skipped.

The passes of the step that just failed are run once more, with every module watched: forward, then backward. In a
forward pass the first module with a non-finite output is the one; in a backward pass it is the first whose input has a
non-finite gradient while that of its output was finite. Last, the gradients of the parameters are looked at: their sum
over tokens can overflow where nothing else does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .batch import MicroBatch
from .passes import PassRunner


def find_overflow(
    passes: PassRunner,
    bad_gradients: list[str],
    micro_batches: list[MicroBatch],
    scale: float,
    agreed: Callable[[list[str]], list[str]] = lambda found: found,
) -> dict[str, str]:
    """The pass (forward or backward) and the module in which the first non-finite number of a step appeared.

    Gradients are accumulated on top of those of the failed step: all of them are to be thrown away.

    Args:
        bad_gradients: parameters with a non-finite gradient in the failed step, in the order of the model.
        agreed: where several ranks look at the same passes, what all of them take for found.
    """
    parameter = bad_gradients[-1] if bad_gradients else None  # a backward pass reaches the last one first
    for micro_batch in micro_batches:
        for where, watch in (("forward", _watch_forward), ("backward", _watch_backward)):
            found: list[str] = []
            with watch(passes, found.append):
                seen = passes.run_micro_batch(micro_batch, scale)
            if where == "forward" and not found and not bool(seen["new"].isfinite().all()):
                found.append(_head_name(passes))
            found = agreed(found)
            if found:
                return {"where": where, "module": found[0]}
    if parameter is None:
        return {"where": "gradient norm", "module": ""}
    return {"where": "backward", "module": parameter.rpartition(".")[0]}


@contextmanager
def _watch_forward(passes: PassRunner, report: Callable[[str], None]) -> Iterator[None]:
    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            if any(isinstance(tensor, Tensor) and _overflowed(tensor) for tensor in tensors):
                report(name)

        return hook

    # children report before their parents do, so the first name is the innermost module
    with _hooks([module.register_forward_hook(watch(name)) for name, module in _modules(passes)]):
        yield


@contextmanager
def _watch_backward(passes: PassRunner, report: Callable[[str], None]) -> Iterator[None]:
    body = next(name for name, module in passes.policy.model.named_modules() if module is passes.policy.body)

    def watch(name: str) -> tuple[Any, Any]:
        parent = name.rpartition(".")[0]
        consumer = _head_name(passes) if parent in ("", body) else parent

        def on_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            # an alias of its own, since the gradient of a shared input is a sum over all that use it
            return tuple(_report_gradient(x.view_as(x), name, report) if _has_gradient(x) else x for x in inputs)

        def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
            if _has_gradient(output):  # already bad when it gets here: what consumed the output made it so
                _report_gradient(output, consumer, report)

        return on_input, on_output

    handles = []
    for name, module in _modules(passes):
        if not any(True for _ in module.children()):
            on_input, on_output = watch(name)
            handles += [module.register_forward_pre_hook(on_input), module.register_forward_hook(on_output)]
    with _hooks(handles):
        yield


@contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _modules(passes: PassRunner) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in passes.policy.model.named_modules() if name]


def _head_name(passes: PassRunner) -> str:
    head: nn.Module | None = passes.policy.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return next((name for name, module in _modules(passes) if module is head), "head")


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _report_gradient(tensor: Tensor, name: str, report: Callable[[str], None]) -> Tensor:
    def hook(gradient: Tensor) -> None:
        if _overflowed(gradient):
            report(name)

    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return tensor


def _overflowed(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
