"""What the pipeline job and its test share: variants of a tiny model, packed micro-batches, one process training."""

import tiny_run
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from hf_sparsebalance.attention import StatsCollector
from hf_sparsebalance.stages import ModelTimes

NUM_LAYERS = 5
TIMES = ModelTimes((1.0,) * NUM_LAYERS, head_ms=1.0)
# Lengths of the documents of each micro-batch; the next step's micro-batches have other lengths.
STEPS = (((8, 12), (30,), (5,), (17, 9, 3)), ((25,), (4, 7), (14, 14), (21, 2)))
BUDGETS = (0.2, 0.9, 0.5, 1.0)
VARIANTS = {
    "plain": {},
    "checkpointed": {"checkpointing": True},
    "tied": {"tied": True},
    "lora": {"lora": range(NUM_LAYERS), "tied": True, "checkpointing": True},
    "lora_above": {"lora": range(2, NUM_LAYERS)},
}
LEARNING_RATE = 0.05


def build_model(variant, dtype=torch.float32):
    """The whole model, the same everywhere."""
    settings = VARIANTS[variant]
    torch.manual_seed(0)
    config = tiny_run.config_of(num_hidden_layers=NUM_LAYERS, tie_word_embeddings=settings.get("tied", False))
    config.sparse_attention = {"block_size": tiny_run.BLOCK}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sparsebalance").to(dtype)
    if settings.get("checkpointing"):
        model.gradient_checkpointing_enable()
    if "lora" in settings:
        adapted = {"layers_to_transform": list(settings["lora"]), "target_modules": ["q_proj", "v_proj", "down_proj"]}
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **adapted))
    return model


def global_batch(step, num_pipelines, collect=False):
    """Micro-batches of each pipeline at a step, each with a budget of its own, and if asked a statistics collector."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    pipelines = []
    for pipeline in range(num_pipelines):
        generator = torch.Generator().manual_seed(100 * step + pipeline)
        lengths = STEPS[(step + pipeline) % len(STEPS)]
        tokens = [
            [torch.randint(1, tiny_run.VOCAB, (length,), generator=generator).tolist() for length in each]
            for each in lengths
        ]
        pipelines.append([collate([{"input_ids": ids} for ids in documents]) for documents in tokens])
    num_items = sum(int((each["labels"][:, 1:] != -100).sum()) for own in pipelines for each in own)
    for own in pipelines:
        for micro_batch, budget in zip(own, BUDGETS, strict=True):
            micro_batch |= {"num_items_in_batch": torch.tensor(num_items), "sparse_top_p": torch.tensor(budget)}
            if collect:
                micro_batch["sparse_stats"] = StatsCollector()
    return pipelines


def train_in_one_process(variant, num_pipelines, dtype=torch.float32):
    """Losses [step][pipeline], gradients and statistics of each step and the last parameters, without a pipeline.

    The gradients of each pipeline's micro-batches are added up apart, as the ranks do it.
    """
    model = build_model(variant, dtype).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses, gradients, stats = [], [], []
    for step in range(len(STEPS)):
        sums, step_losses = {}, []
        pipelines = global_batch(step, num_pipelines, collect=True)
        for own in pipelines:
            optimizer.zero_grad()
            step_losses.append([])
            for micro_batch in own:
                loss = model(**micro_batch, use_cache=False).loss
                loss.backward()
                step_losses[-1].append(loss.detach().float())
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0.0) + parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = sums.get(name)
        optimizer.step()
        losses.append([torch.stack(each) for each in step_losses])
        gradients.append(sums)
        stats.append([[micro_batch["sparse_stats"].vectors for micro_batch in own] for own in pipelines])
    return losses, gradients, stats, {name: p.detach() for name, p in model.named_parameters()}
