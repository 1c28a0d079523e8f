"""Worker of bench_parallel.py: two steps under one topology, and what each process holds after them.

accelerate launch ... evaluation/parallel_memory.py ddp|fsdp|pp FOLDER LAYERS
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import datasets
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, TrainerCallback, TrainerControl, TrainerState
from transformers.distributed import DistributedConfig

from hf_sparsebalance import SparseBalanceArguments, SparseBalanceTrainer


class Measure(TrainerCallback):
    """Bytes after the last backward pass of the run, before gradients are thrown away."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def on_optimizer_step(
        self, args: SparseBalanceArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        parameters = list(model.parameters())
        moments = [value for state in optimizer.state.values() for value in state.values()]
        self.held = {
            "parameters": sum(map(size, parameters)),
            "gradients": sum(size(p.grad) for p in parameters if p.grad is not None),
            "optimizer": sum(map(size, moments)),
        }


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor on this process."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def peak() -> int:
    """Most memory this process ever held, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    topology, folder, layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    config = Qwen2Config(
        vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=512,
    )  # fmt: skip
    args = SparseBalanceArguments(
        output_dir=str(folder / "run"),
        max_steps=2,
        gradient_accumulation_steps=4 if topology == "pp" else 2,
        batching="random",
        tolerance=0.0,
        block_size=16,
        pipeline_parallel_size=2 if topology == "pp" else 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        num_ranks=2,
    )
    if args.process_index == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    torch.distributed.barrier()
    start = peak()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        attn_implementation="sparsebalance",
        distributed_config=DistributedConfig(fsdp_size=2) if topology == "fsdp" else None,
    )
    data = datasets.Dataset.from_dict({"input_ids": [[1 + n % 7] * 64 for n in range(16)]})
    measure = Measure()
    SparseBalanceTrainer(model=model, args=args, train_dataset=data, callbacks=[measure]).train()
    row = {"topology": topology, "rank": args.process_index, **measure.held, "peak": peak() - start}
    (folder / f"{args.process_index}.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
