"""Times of one rank's micro-batches, without the waiting.

The backward pass of the last micro-batch ends, for its caller, when the slowest rank's gradients have arrived.  What a
micro-batch cost its own rank ends earlier: when the last parameter's gradient was accumulated here.  Hooks on the
parameters mark that moment.  On CUDA the marks are events; nothing waits for the device until the step's times are
read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class MicroBatchTime:
    """Milliseconds: start after the step's start, forward pass with loss, backward pass without waiting."""

    start_ms: float
    forward_ms: float
    backward_ms: float


class MicroBatchClock:
    """Marks the step, each micro-batch, its forward pass and its last gradient on one rank.

    Args:
        device: where the model runs; CUDA is timed by events, anything else by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._step: Mark | None = None
        self._open: list[Mark] = []
        self._last_gradient: Mark | None = None
        self._micro_batches: list[tuple[Mark, Mark, Mark]] = []

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.utils.hooks.RemovableHandle]:
        """Hook the trainable parameters; remove the handles after training."""
        return [
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def start_step(self) -> None:
        """The step begins here; forgets the one before."""
        self._micro_batches = []
        self._step = _now(self._events)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around a forward and backward pass."""
        self._last_gradient = None
        self._open = [_now(self._events)]
        yield
        forward_end = self._open[1] if len(self._open) > 1 else self._open[0]
        self._micro_batches.append((self._open[0], forward_end, self._last_gradient or _now(self._events)))
        self._open = []

    def forward_ended(self) -> None:
        """The loss is there.  Ignored outside a micro-batch (evaluation shares the code that calls this)."""
        if len(self._open) == 1:
            self._open.append(_now(self._events))

    def times(self) -> list[MicroBatchTime]:
        """The step's micro-batches so far, in order; waits for the device."""
        assert self._step is not None
        if self._events:
            torch.cuda.synchronize()
        return [
            MicroBatchTime(_between(self._step, start), _between(start, forward), _between(forward, end))
            for start, forward, end in self._micro_batches
        ]

    def _gradient_arrived(self, _parameter: torch.nn.Parameter) -> None:
        if self._open:
            # One event per micro-batch serves all its parameters: each gradient moves the mark.
            self._last_gradient = _now(self._events, self._last_gradient)


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One operation of a pipeline stage, in milliseconds after the step's start, without the waiting.

    Attributes:
        kind: forward F, backward B, or a backward in two parts: I (of the input) and W (of the weights).
        stage, micro_batch: what it worked on.
        start_ms, end_ms: when.
    """

    kind: str
    stage: int
    micro_batch: int
    start_ms: float
    end_ms: float


class OperationClock:
    """Times the operations of one rank's pipeline stages.

    Args:
        device: where the model runs; CUDA is timed by events, anything else by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._step: Mark | None = None
        self._operations: list[tuple[str, int, int, Mark, Mark]] = []

    def start_step(self) -> None:
        """The step begins here: times count from now."""
        self._step = _now(self._events)

    def forget(self) -> None:
        """The operations of a new step follow."""
        self._operations = []
        if self._step is None:
            self.start_step()

    @contextlib.contextmanager
    def operation(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Around the work of one operation, where nothing is waited for."""
        start = _now(self._events)
        yield
        self._operations.append((kind, stage, micro_batch, start, _now(self._events)))

    def times(self) -> list[MicroBatchTime]:
        """What each of the step's micro-batches cost this rank; waits for the device."""
        return micro_batch_times(self.operations())

    def operations(self) -> list[OperationTime]:
        """The step's operations so far, in the order they ran; waits for the device."""
        assert self._step is not None
        if self._events:
            torch.cuda.synchronize()
        return [
            OperationTime(kind, stage, micro_batch, _between(self._step, start), _between(self._step, end))
            for kind, stage, micro_batch, start, end in self._operations
        ]


def micro_batch_times(operations: Iterable[OperationTime]) -> list[MicroBatchTime]:
    """What each micro-batch cost a rank, all its stages together, from the rank's operations; in order of number."""
    own: dict[int, list[OperationTime]] = {}
    for operation in operations:
        own.setdefault(operation.micro_batch, []).append(operation)

    def spent(operations: Iterable[OperationTime]) -> float:
        return sum(each.end_ms - each.start_ms for each in operations)

    return [
        MicroBatchTime(
            start_ms=min(each.start_ms for each in own[number]),
            forward_ms=spent(each for each in own[number] if each.kind == "F"),
            backward_ms=spent(each for each in own[number] if each.kind != "F"),
        )
        for number in sorted(own)
    ]


def _now(events: bool, reuse: Mark | None = None) -> Mark:
    """This moment; an event given is moved to it."""
    if not events:
        return time.perf_counter()
    event = reuse if isinstance(reuse, torch.cuda.Event) else torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end)
    assert not isinstance(end, torch.cuda.Event)
    return (end - start) * 1000.0
