"""Pipeline parallelism on torch's schedules, for micro-batches of different lengths.

torch.distributed.pipelining fixes the shape of what stages exchange at the first micro-batch.  Here every rank knows
the step's micro-batches from the common plan, so each derives the shapes by itself and nothing about them is sent; a
receive buffer is allocated when its receive is posted, not for all micro-batches ahead.  torch carries hidden states
and gradients between stages; everything else about a micro-batch (budget, documents, labels) stays with each rank's
stages, which hold it by number.

torch offers no public way to this: the private names used are those of torch 2.11 to 2.13, and others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hf_sparsebalance.errors import UserError
from hf_sparsebalance.stage_model import StageModule
from hf_sparsebalance.timing import OperationClock
from hf_sparsebalance.torch_schedules import SCHEDULES, worker_stages

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)


def check_torch(version: str = torch.__version__) -> None:
    """Refuse a torch whose private pipelining API was not tried.

    Raises:
        UserError: naming the versions that were.
    """
    if not OLDEST_TORCH <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST_TORCH:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
        raise UserError(
            f"--pipeline_parallel_size works with torch {oldest} to {newest} (it uses parts of torch that are not "
            f"public), and this is {version}: install one of those, or use data parallelism"
        )


check_torch()
from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: E402  (another torch may not have them)
from torch.distributed.pipelining.stage import _PipelineStageBase  # noqa: E402


class Pipeline:
    """The stages of one rank, and the schedule that drives them together with those of the other ranks.

    Args:
        stages: of this rank, as from ``make_stages``; which ones is for the schedule to say (``worker_stages``).
        schedule: one of ``torch_schedules.SCHEDULES``.
        group: the ranks of one pipeline, in order.
        device: where the stages are.

    Attributes:
        clock: when this rank worked on what in the last step, waiting left out.

    Raises:
        UserError: torch's version was not tried, the schedule is unknown, or the ranks do not agree.
        ValueError: other stages than the schedule wants of this rank.
    """

    def __init__(
        self, stages: Sequence[StageModule], schedule: str, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        if schedule not in SCHEDULES:
            raise UserError(f"--pipeline_schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
        self.device = device
        self._group, self._schedule = group, schedule
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        every = worker_stages(schedule, size)
        if tuple(module.stage for module in stages) != every[rank]:
            raise ValueError(f"{schedule} wants the stages {every[rank]} on rank {rank} of {size}")
        self._ends = tuple(
            next(worker for worker, own in enumerate(every) if end in own) for end in (0, stages[0].num_stages - 1)
        )
        self.clock = OperationClock(device)
        self._stages = [_Stage(module, group, device, self.clock) for module in stages]
        self._engines: dict[int, Any] = {}
        # The first collective of a group involves all its ranks; later, pairs of them suffice.
        seen: list[Any] = [None] * size
        settings = (schedule, stages[0].num_stages, stages[0].hidden_size, str(stages[0].dtype), torch.__version__)
        dist.all_gather_object(seen, settings, group=group)
        if len(set(seen)) > 1:
            raise UserError(
                f"the ranks of a pipeline differ in (schedule, stages, hidden size, dtype, torch): {seen}: start them "
                "all with the same options, files and versions"
            )

    def train_step(self, micro_batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Forward and backward of one step; gradients are added to the parameters' ``grad``.

        Args:
            micro_batches: the same on all ranks of the pipeline, on this rank's device; see ``StageModule.forward``.

        Returns:
            float32 ``[micro-batches]``: losses, on every rank.  Their sum is this pipeline's part of the global loss.

        Raises:
            UserError: the schedule does not take this number of micro-batches.
        """
        return self._run(micro_batches, has_backward=True)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Losses without gradients, as ``train_step`` returns them."""
        return self._run(micro_batches, has_backward=False)

    def sum_tied_gradients(self) -> None:
        """Give both copies of a tied weight the sum of their gradients; collective between first and last rank.

        After gradients were reduced over data-parallel ranks, before they are clipped.  The sum is taken in the same
        order on both sides, so that the copies stay equal to the last bit.
        """
        for stage in self._stages:
            weight = stage.submod.tied_weight
            if weight is None or not weight.requires_grad:
                continue
            mine = weight.grad if weight.grad is not None else torch.zeros_like(weight)
            theirs = torch.empty_like(mine)
            other = dist.get_global_rank(self._group, self._ends[1 if stage.is_first else 0])
            exchange = [
                dist.P2POp(dist.isend, mine.contiguous(), other, self._group),
                dist.P2POp(dist.irecv, theirs, other, self._group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            weight.grad = mine + theirs if stage.is_first else theirs + mine

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages so that their joint 2-norm is at most ``max_norm``; collective.

        After ``sum_tied_gradients``; a tied weight counts once.

        Returns:
            float64, 0-d: the norm before.
        """
        # By identity: two stages of one rank may share a tied weight.
        own = {p: stage for stage in self._stages for p in stage.submod.parameters() if p.grad is not None}
        counted = [p.grad for p, stage in own.items() if stage.is_first or p is not stage.submod.tied_weight]
        square = torch.nn.utils.get_total_norm(counted).to(self.device, torch.float64) ** 2
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(list(own), max_norm, norm)
        return norm

    def gather_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The whole model's state dict from those of the ranks; collective.

        Args:
            state_dict: of this rank's model, or only its adapters'.

        Returns:
            On the first rank, every tensor once, on the CPU, a tied weight under the embedding's name; else None.
        """
        tied = [stage.submod.tied_weight for stage in self._stages if stage.is_last]
        seen, own = {weight.data_ptr() for weight in tied if weight is not None}, {}
        for name, tensor in state_dict.items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                own[name] = tensor.detach()
        first = dist.get_global_rank(self._group, 0)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        if dist.get_rank(self._group):
            dist.gather_object(shapes, dst=first, group=self._group)
            for tensor in own.values():
                dist.send(tensor.to(self.device).contiguous(), first, group=self._group)
            return None
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.gather_object(shapes, gathered, dst=first, group=self._group)
        whole = {name: tensor.cpu() for name, tensor in own.items()}
        for rank, theirs in enumerate(gathered[1:], start=1):
            for name, (shape, dtype) in theirs.items():
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received, dist.get_global_rank(self._group, rank), group=self._group)
                whole[name] = received.cpu()
        return whole

    def _run(self, micro_batches: Sequence[Mapping[str, Any]], has_backward: bool) -> torch.Tensor:
        count = len(micro_batches)
        engine = self.engine(count)
        engine._has_backward = has_backward
        for stage in self._stages:
            stage.submod.train(has_backward)
            stage.start_step(micro_batches, has_backward)
        losses: list[torch.Tensor] = []
        self.clock.forget()
        try:
            engine._step_microbatches(target_mbs=[None] * count, losses=losses, return_outputs=False)
        except RuntimeError as error:
            # torch wraps whatever a stage's forward pass raises.
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from error
            raise
        for stage in self._stages:
            stage.end_step()
        # Only the last stage's rank has them.
        summed = torch.stack(losses).float() if losses else torch.empty(count, device=self.device)
        dist.broadcast(summed, dist.get_global_rank(self._group, self._ends[1]), group=self._group)
        return summed

    def engine(self, num_micro_batches: int) -> Any:
        """torch's schedule object; it is made for one number of micro-batches.

        Raises:
            UserError: the schedule does not take this number.
        """
        if num_micro_batches not in self._engines:
            single = self._schedule in ("gpipe", "1f1b")
            try:
                self._engines[num_micro_batches] = get_schedule_class(self._schedule)(
                    self._stages[0] if single else self._stages, num_micro_batches, _returned_loss, scale_grads=False
                )
            except ValueError as error:
                raise UserError(
                    f"--pipeline_schedule {self._schedule} with {dist.get_world_size(self._group)} pipeline ranks and "
                    f"{num_micro_batches} micro-batches: {error}; change --gradient_accumulation_steps"
                ) from error
        return self._engines[num_micro_batches]


class _Stage(_PipelineStageBase):  # type: ignore[misc]
    """torch's stage, with buffers of its micro-batch's length, keyword arguments by number, and a clock.

    Before a receive is posted there is no buffer; once it is read, torch's own caches keep it while autograd needs it.
    """

    def __init__(
        self, module: StageModule, group: dist.ProcessGroup, device: torch.device, clock: OperationClock
    ) -> None:
        super().__init__(module, module.stage, module.num_stages, device, group)
        self._clock = clock
        self._micro_batches: Sequence[Mapping[str, Any]] = ()
        self._running = 0
        self._inputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        # What torch's backward and its check of the schedule look up: one tensor in, and no skip connections.
        self._stage_meta = SimpleNamespace(inputs=(None,))
        self.args_recv_info[0] = ()
        self._runtime_validate = False

    def start_step(self, micro_batches: Sequence[Mapping[str, Any]], has_backward: bool) -> None:
        """The micro-batches of the step that begins."""
        self._micro_batches, self.chunks, self.has_backward = micro_batches, len(micro_batches), has_backward

    def end_step(self) -> None:
        """Let go of what the step has left."""
        self._micro_batches = ()
        for leftover in (self._inputs, self._gradients, self.fwd_cache, self.bwd_cache, self.output_chunks):
            leftover.clear()

    # The forward and backward passes are torch's.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> torch.Tensor:
        self._running = fwd_chunk_id
        with self._clock.operation("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def forward_maybe_with_nosync(self, *args: torch.Tensor) -> torch.Tensor:
        output = self.submod(self._micro_batches[self._running], *args)
        # A first stage may have nothing to train; the second sends gradients all the same.
        return output if output.requires_grad else output.requires_grad_(self.has_backward)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self._clock.operation("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._clock.operation("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    # Between stages of two ranks.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_first else [self._receive(self._inputs, fwd_chunk_id, self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else [self._send(self.fwd_cache[fwd_chunk_id][0][0], self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        return [self._receive(self._gradients, bwd_chunk_id, self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        return [self._send(self.bwd_cache.pop(bwd_chunk_id)[0], self.stage_index - 1)]

    def _receive(self, into: dict[int, torch.Tensor], number: int, source: int) -> dist.P2POp:
        shape = (*self._micro_batches[number]["input_ids"].shape, self.submod.hidden_size)
        into[number] = torch.empty(shape, dtype=self.submod.dtype, device=self.device)
        return dist.P2POp(dist.irecv, into[number], self._rank_of(source), self.group)

    def _send(self, tensor: torch.Tensor, target: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor.detach().contiguous(), self._rank_of(target), self.group)

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    # Between two stages of one rank (ZBV's turning point).

    def set_local_fwd_input(self, prev_stage_outputs: torch.Tensor, mb_index: int) -> None:
        self._inputs[mb_index] = prev_stage_outputs.detach()

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor, ...]:
        return self.bwd_cache.pop(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor, ...], mb_index: int) -> None:
        if next_stage_bwd_outputs:
            self._gradients[mb_index] = next_stage_bwd_outputs[0]

    # From the buffers into torch's forward and backward.

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor]:
        return (self._inputs.pop(fwd_chunk_id).requires_grad_(self.has_backward),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor]:
        return (self._gradients.pop(bwd_chunk_id),)

    # What torch would infer, warm up or check; in torch 2.11 the last two are called at each forward pass.

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> tuple[()]:
        return ()

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        return None

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[()]:
        return ()

    def _validate_fwd_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        pass


def _returned_loss(output: torch.Tensor, _target: None) -> torch.Tensor:
    """The last stage has computed it."""
    return output
