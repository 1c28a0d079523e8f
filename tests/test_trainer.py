"""SparseBalanceTrainer in one process, on the CPU, against plain training loops."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import datasets
import pytest
import tiny_run
import torch
import torch.nn.functional as F
from tiny_run import (
    BASE_TOP_P,
    BLOCK,
    LEARNING_RATE,
    LENGTHS,
    TOLERANCE,
    VOCAB,
    config_of,
    documents,
    write_profile,
)
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DataCollatorWithFlattening,
    PreTrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import CausalLMOutput

from hf_sparsebalance import runlog
from hf_sparsebalance.balance import StepBalance
from hf_sparsebalance.batching import plan_batches
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency_profile import LatencyProfile
from hf_sparsebalance.planner import Planner
from hf_sparsebalance.report import summarise
from hf_sparsebalance.trainer import SparseBalanceTrainer

STEPS_PER_EPOCH = 3
# Loss and norms are computed in fp32 whatever the model's dtype.
ROUNDING = torch.finfo(torch.float32).eps


def dataset(lengths=LENGTHS, **columns):
    return datasets.Dataset.from_dict({"input_ids": [list(ids) for ids in documents(lengths)], **columns})


def build(attention="sparsebalance", dtype=torch.float32, config=None):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config or config_of()), attn_implementation=attention).to(
        dtype
    )


def arguments(folder, **changes):
    """Two micro-batches of two documents a step, reproducible to the bit."""
    return tiny_run.arguments(folder, **{"per_device_train_batch_size": 2, "refit": False, **changes})


class Recorder(TrainerCallback):
    """Collates and remembers the documents of each micro-batch; keeps the parameters after each step."""

    def __init__(self):
        self.collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        self.micro_batches = []
        self.parameters = []

    def __call__(self, rows):
        self.micro_batches.append(tuple(row["input_ids"][0] - 1 for row in rows))
        return self.collator(rows)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.parameters.append(parameters_of(model))


def parameters_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(folder, model=None, data=None, resume=None, callbacks=(), with_profile=True, **changes):
    """(trainer, recorder) after a run."""
    model = model or build()
    args = arguments(folder, **changes)
    if with_profile:
        Path(folder).mkdir(parents=True, exist_ok=True)
        args.profile = write_profile(Path(folder) / "profile.json", model, args)
    recorder = Recorder()
    trainer = SparseBalanceTrainer(
        model=model,
        args=args,
        train_dataset=data if data is not None else dataset(),
        data_collator=recorder,
        callbacks=[recorder, *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "balance.jsonl").read_text().splitlines()]


def samples_of(line):
    return [sample for micro_batch in line["micro_batches"] for sample in micro_batch["documents"]]


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_blocks(model):
    """A copy in training mode that attends in the run's blocks, which the arguments give the trainer's model."""
    model = copy.deepcopy(model).train()
    model.config.sparse_attention = {"block_size": BLOCK, "top_p": BASE_TOP_P}
    return model


def plain_loop(model, steps, labels=None, **keywords):
    """SGD, document by document without packing: (loss, parameters) after each step of these samples."""
    model = with_blocks(model)
    labels = labels or documents()
    after = []
    for samples in steps:
        targets = [torch.tensor(labels[sample])[1:] for sample in samples]
        num_targets = sum(int((target != -100).sum()) for target in targets)
        model.zero_grad()
        total = 0.0
        for sample, target in zip(samples, targets, strict=True):
            logits = model(input_ids=torch.tensor([documents()[sample]]), use_cache=False, **keywords).logits[0, :-1]
            loss = F.cross_entropy(logits, target, reduction="sum", ignore_index=-100) / num_targets
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
        after.append((total, parameters_of(model)))
    return after


def assert_same_training(found, losses, expected, start):
    """Parameters after each step, and losses, differ by rounding only.

    A gradient sums one term per token, each rounded in fp32: (tokens x eps) of the largest update.
    """
    bound = ROUNDING * sum(LENGTHS)
    assert len(found) == len(losses) == len(expected)
    for parameters, loss, (expected_loss, expected_parameters) in zip(found, losses, expected, strict=True):
        update = max(float((expected_parameters[name] - start[name]).abs().max()) for name in start)
        assert update > 1e-3
        for name, parameter in parameters.items():
            assert float((parameter - expected_parameters[name]).abs().max()) <= bound * update, name
        assert loss == pytest.approx(expected_loss, rel=bound)


# A whole run.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two tuned epochs with everything on, saved at the end."""
    folder = tmp_path_factory.mktemp("run")
    before = parameters_of(build())
    trainer, recorder = train(folder, num_train_epochs=2)
    trainer.save_model()
    return trainer, recorder, before, folder


def test_every_parameter_moves(run):
    """Training reaches every parameter of the model."""
    trainer, _, before, _ = run
    for name, parameter in parameters_of(trainer.model).items():
        assert not torch.equal(parameter, before[name]), name


def test_each_document_is_seen_once_an_epoch(run):
    """The collator gets every document exactly once per epoch, in the order that the log tells."""
    _, recorder, _, folder = run
    lines = log_of(folder)
    logged = [tuple(micro_batch["documents"]) for line in lines for micro_batch in line["micro_batches"]]
    assert recorder.micro_batches == logged
    for epoch in (0, 1):
        seen = [sample for line in lines if line["epoch"] == epoch for sample in samples_of(line)]
        assert sorted(seen) == list(range(len(LENGTHS)))
    assert logged[: len(logged) // 2] != logged[len(logged) // 2 :]


def test_the_log_has_one_line_per_step(run):
    """balance.jsonl numbers the steps from 1, every micro-batch with its measurements, and can be reported."""
    trainer, _, _, folder = run
    lines = log_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert trainer.state.global_step == len(lines)
    for line in lines:
        assert [(m["rank"], m["slot"]) for m in line["micro_batches"]] == [(0, 0), (0, 1)]
        for m in line["micro_batches"]:
            assert m["tokens"] == sum(LENGTHS[sample] for sample in m["documents"])
            assert m["predicted_ms"] > 0 and m["forward_ms"] > 0 and m["backward_ms"] > 0
            assert 0 < m["density"] <= 1 and 0 < m["work"] <= 1
            # The gate's mass kept is at least the budget, up to the fp32 sums of it.
            assert m["coverage"] >= m["top_p"] - ROUNDING * max(LENGTHS)
        starts = [m["start_ms"] for m in line["micro_batches"]]
        assert starts == sorted(starts)
        busy_ms = sum(m["forward_ms"] + m["backward_ms"] for m in line["micro_batches"])
        assert busy_ms <= line["step_s"] * 1000
    runlog.write_run(
        folder,
        {
            "name": "run", "attention": "sparsebalance", "batching": "sparsity_aware", "tuning": "optimal",
            "base_top_p": BASE_TOP_P, "tolerance": TOLERANCE, "anchor": "optimal", "scope": "rank",
            "documents": len(LENGTHS), "heldout_loss_before": None, "heldout_loss_after": None, "environment": {},
        },
    )  # fmt: skip
    read = runlog.read_run(folder)
    assert summarise(read, read)["steps"] == len(lines)


def test_budgets_keep_their_promises(run):
    """No budget falls below base - tolerance, some move, and their token-weighted mean is no less than the base."""
    _, _, _, folder = run
    moved = set()
    for line in log_of(folder):
        budgets = [m["top_p"] for m in line["micro_batches"]]
        tokens = [m["tokens"] for m in line["micro_batches"]]
        assert min(budgets) >= BASE_TOP_P - TOLERANCE - 1e-12
        mean = sum(p * n for p, n in zip(budgets, tokens, strict=True)) / sum(tokens)
        assert mean >= BASE_TOP_P - 1e-9
        moved |= set(budgets)
    assert moved != {BASE_TOP_P}


def test_logs_carry_the_balance(run):
    """Every training log entry has the step's time, its imbalances by name, and budget and work."""
    trainer, _, _, folder = run
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2 * STEPS_PER_EPOCH
    wanted = {
        "step_time_s", "tokens_per_s", "imbalance_microbatch", "imbalance_slot", "imbalance_rank", "planning_ms",
        "top_p", "density", "work", "coverage", "predictor_error", "attention_scale", "linear_scale",
    }  # fmt: skip
    for entry, line in zip(entries, log_of(folder), strict=True):
        assert wanted <= set(entry)
        assert entry["step_time_s"] == line["step_s"]
        assert entry["imbalance_rank"] == 1.0  # one rank waits for nobody
        busy = [m["forward_ms"] + m["backward_ms"] for m in line["micro_batches"]]
        assert entry["imbalance_microbatch"] == pytest.approx(max(busy) / (sum(busy) / len(busy)))


def test_the_saved_model_is_a_plain_one(run):
    """from_pretrained loads the result without us, with the trained weights; config.json keeps the settings."""
    trainer, _, _, folder = run
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config._attn_implementation == "sdpa"
    assert loaded.config.sparse_attention["top_p"] == BASE_TOP_P
    assert loaded.config.sparse_attention["block_size"] == BLOCK
    for name, parameter in parameters_of(loaded).items():
        assert torch.equal(parameter, trainer.model.get_parameter(name).detach()), name


def test_evaluation_uses_the_base_budget(tmp_path):
    """evaluate() after tuned training needs no keyword: its loss is the mean over tokens at the base budget."""
    model = build()
    args = arguments(tmp_path, per_device_eval_batch_size=len(LENGTHS))
    args.profile = write_profile(tmp_path / "profile.json", model, args)
    trainer = SparseBalanceTrainer(model=model, args=args, train_dataset=dataset(), eval_dataset=dataset())
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    losses = {}
    with torch.no_grad():
        for top_p in (BASE_TOP_P, 1.0):
            losses[top_p] = []
            for ids in documents():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False, sparse_top_p=top_p).logits[0, :-1]
                losses[top_p] += F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
    base, dense = (sum(values) / len(values) for values in losses.values())
    bound = ROUNDING * sum(LENGTHS)
    assert found == pytest.approx(base, rel=bound) and found != pytest.approx(dense, rel=bound)


def test_checkpointing_changes_no_bit_of_a_tuned_run(tmp_path):
    """Gradient checkpointing under changing budgets ends in the same parameters, to the bit."""
    ends = []
    for name, changes in (("plain", {}), ("recomputed", {"gradient_checkpointing": True})):
        trainer, _ = train(tmp_path / name, **changes)
        ends.append((list(map(planned, log_of(tmp_path / name))), parameters_of(trainer.model)))
    assert ends[0][0] == ends[1][0]
    for name, parameter in ends[0][1].items():
        assert torch.equal(parameter, ends[1][1][name]), name


def test_a_failure_of_the_planning_thread_stops_the_next_step(monkeypatch, tmp_path):
    """What goes wrong while planning beside a step is raised when the next begins, not at the epoch's end."""
    steps, begin = [], StepBalance.begin

    def count(self, global_step):
        keywords = begin(self, global_step)
        steps.append(global_step)
        return keywords

    def fail(self, measured):
        raise RuntimeError("planning failed")

    monkeypatch.setattr(StepBalance, "begin", count)
    monkeypatch.setattr(Planner, "observe", fail)
    with pytest.raises(RuntimeError, match="planning failed"):
        train(tmp_path)
    assert steps == [0, 1]


# A k per micro-batch and layer.

TOP_K = {"base_top_p": None, "base_top_k": 5, "anchor": "min", "scope": "microbatch", "tolerance": 0.05}


def chosen_top_k(monkeypatch, folder, **changes):
    """By micro-batch, in the order they ran: the planned k and each layer's own."""
    seen, step = [], SparseBalanceTrainer.training_step

    def record(self, model, inputs, num_items_in_batch=None):
        loss = step(self, model, inputs, num_items_in_batch)
        seen.append((int(inputs["sparse_top_k"]), [int(k) for k in inputs["sparse_stats"].top_k.values()]))
        return loss

    monkeypatch.setattr(SparseBalanceTrainer, "training_step", record)
    trainer, _ = train(folder, **{**TOP_K, **changes})
    return seen, trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_top_k_is_tuned_by_micro_batch_and_layer(monkeypatch, tmp_path, checkpointing):
    """The log holds the mean k of the layers, and counts each (micro-batch, layer) that raised the anchor's k once."""
    seen, trainer = chosen_top_k(monkeypatch, tmp_path, gradient_checkpointing=checkpointing)
    lines, num_layers = log_of(tmp_path), trainer.model.config.num_hidden_layers
    logged = [m for line in lines for m in line["micro_batches"]]
    assert len(seen) == len(logged) and len({planned for planned, _ in seen}) > 1
    for (planned, ks), m in zip(seen, logged, strict=True):
        assert len(ks) == num_layers and min(ks) >= planned
        assert m["top_k"] == sum(ks) / num_layers and m["top_p"] is None and 0 < m["density"] <= 1
    by_step = [seen[2 * i : 2 * i + 2] for i in range(len(lines))]
    raised = [sum(k > planned for planned, ks in step for k in ks) for step in by_step]
    assert [line["raised_top_k"] for line in lines] == raised and sum(raised) > 0
    assert trainer.state.log_history[0]["top_k"] > 0
    assert (trainer.model.config.sparse_attention["top_k"], trainer.model.config.sparse_attention["top_p"]) == (
        5,
        None,
    )


def test_a_tolerance_that_allows_everything_raises_nothing(monkeypatch, tmp_path):
    """With tolerance .99 every layer attends with the anchor's k; only the least k's own time may miss the anchor."""
    seen, _ = chosen_top_k(monkeypatch, tmp_path, tolerance=0.99)
    assert all(ks == [planned] * len(ks) for planned, ks in seen)
    assert [line["raised_top_k"] for line in log_of(tmp_path)] == [0] * STEPS_PER_EPOCH


def test_a_top_k_without_tuning_is_the_models(tmp_path):
    """tolerance 0 needs no profile: every layer attends with config.sparse_attention's own k, sinks included."""
    config = config_of()
    config.sparse_attention = {"block_size": BLOCK, "top_k": 2, "sink_blocks": 3}
    train(tmp_path, build(config=config), base_top_p=None, tolerance=0.0, batching="random", with_profile=False)
    logged = [m for line in log_of(tmp_path) for m in line["micro_batches"]]
    assert {(m["top_k"], m["top_p"]) for m in logged} == {(4.0, None)}  # three sinks and the own block


def test_a_resumed_top_k_run_is_the_uninterrupted_one(tmp_path):
    """From a checkpoint the same k and, bit for bit, the same parameters follow; another base is refused."""
    whole, _ = train(tmp_path / "whole", **CHECKPOINTED, **TOP_K)
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    rest, _ = train(tmp_path / "rest", resume=checkpoint, **CHECKPOINTED, **TOP_K)
    assert list(map(planned, log_of(tmp_path / "rest"))) == list(map(planned, log_of(tmp_path / "whole")[4:]))
    expected = parameters_of(whole.model)
    for name, parameter in parameters_of(rest.model).items():
        assert torch.equal(parameter, expected[name]), name
    with pytest.raises(UserError, match="--base_top_k 5 .now 4"):
        train(tmp_path / "other", resume=checkpoint, **CHECKPOINTED, **{**TOP_K, "base_top_k": 4})


# The same gradients as without balancing.


@pytest.mark.parametrize("changes", [{"batching": "random"}, {"batching": "sparsity_aware", "window": 1}, {}])
def test_tuning_off_is_plain_training(tmp_path, changes):
    """Without tuning a step's update is that of a plain loop over the same documents, one by one, at the base."""
    model = build(dtype=torch.float64)
    start = parameters_of(model)
    original = copy.deepcopy(model)
    trainer, recorder = train(tmp_path, model, tolerance=0.0, **changes)
    expected = plain_loop(original, map(samples_of, log_of(tmp_path)), sparse_top_p=BASE_TOP_P)
    assert_same_training(recorder.parameters, losses_of(trainer), expected, start)


def test_window_one_sees_the_samples_of_random_order(tmp_path):
    """With window 1 each step holds the documents that random order gives it, and so the same parameters follow."""
    runs = []
    for name, changes in (("random", {"batching": "random"}), ("window", {"window": 1})):
        trainer, recorder = train(tmp_path / name, build(dtype=torch.float64), tolerance=0.0, **changes)
        runs.append((trainer, recorder, [sorted(samples_of(line)) for line in log_of(tmp_path / name)]))
    assert runs[0][2] == runs[1][2]
    start = parameters_of(build(dtype=torch.float64))
    expected = list(zip(losses_of(runs[0][0]), runs[0][1].parameters, strict=True))
    assert_same_training(runs[1][1].parameters, losses_of(runs[1][0]), expected, start)


def test_a_larger_window_regroups(tmp_path):
    """With a larger window steps hold other documents than random order's: the guard of the test above."""
    train(tmp_path / "a", tolerance=0.0, batching="random", num_train_epochs=1)
    train(tmp_path / "b", tolerance=0.0, window=3, num_train_epochs=1)
    assert [sorted(samples_of(line)) for line in log_of(tmp_path / "a")] != [
        sorted(samples_of(line)) for line in log_of(tmp_path / "b")
    ]


def test_tuned_budgets_reach_their_own_documents(tmp_path):
    """A tuned step's update is that of a plain loop in which each document has the budget the log tells."""
    model = build(dtype=torch.float64)
    start, original = parameters_of(model), with_blocks(model)
    _, recorder = train(tmp_path, model)
    line = log_of(tmp_path)[0]
    budgets = {sample: m["top_p"] for m in line["micro_batches"] for sample in m["documents"]}
    assert len(set(budgets.values())) > 1
    num_targets = sum(LENGTHS[sample] - 1 for sample in budgets)
    for sample, budget in budgets.items():
        ids = torch.tensor([documents()[sample]])
        logits = original(input_ids=ids, use_cache=False, sparse_top_p=budget).logits[0, :-1]
        (F.cross_entropy(logits, ids[0, 1:], reduction="sum") / num_targets).backward()
    for name, parameter in original.named_parameters():
        update = LEARNING_RATE * parameter.grad
        found = start[name] - recorder.parameters[0][name]
        # tokens of the step x eps, of the largest term
        assert float((found - update).abs().max()) <= ROUNDING * sum(LENGTHS) * float(update.abs().max()), name


def test_sdpa_is_balanced_without_budgets(tmp_path):
    """With sdpa and tolerance 0 batches are those of sparsity_aware planning, and training is plain training."""
    model = build("sdpa", torch.float64)
    start, original = parameters_of(model), copy.deepcopy(model)
    trainer, recorder = train(tmp_path, model, tolerance=0.0, base_top_p=None, block_size=None, window=3)
    lines = log_of(tmp_path)
    assert all(m["top_p"] is None and m["density"] is None for line in lines for m in line["micro_batches"])
    assert sorted(sum(map(samples_of, lines), [])) == list(range(len(LENGTHS)))
    plain = plan_batches(LENGTHS, strategy="random", num_ranks=1, num_slots=2, batch_size=2, seed=3)
    assert [sorted(samples_of(line)) for line in lines] != [
        sorted(i for rank in step for slot in rank for i in slot) for step in plain.steps
    ]
    expected = plain_loop(original, map(samples_of, lines))
    assert_same_training(recorder.parameters, losses_of(trainer), expected, start)
    assert "top_p" not in trainer.state.log_history[0] and "imbalance_rank" in trainer.state.log_history[0]


def test_a_users_own_labels_count(tmp_path):
    """Tokens that a labels column masks give no loss, and the others are weighted over the whole step."""
    labels = [[-100] * (len(ids) // 2) + list(ids[len(ids) // 2 :]) for ids in documents()]
    model = build(dtype=torch.float64)
    start, original = parameters_of(model), copy.deepcopy(model)
    trainer, recorder = train(tmp_path, model, dataset(labels=labels), tolerance=0.0)
    expected = plain_loop(original, map(samples_of, log_of(tmp_path)), labels, sparse_top_p=BASE_TOP_P)
    assert_same_training(recorder.parameters, losses_of(trainer), expected, start)


def test_max_tokens_bounds_micro_batches(tmp_path):
    """--max_tokens bounds every micro-batch, and each document is still seen once."""
    train(tmp_path, max_tokens=90)
    micro_batches = [m for line in log_of(tmp_path) for m in line["micro_batches"]]
    assert max(m["tokens"] for m in micro_batches) <= 90
    assert sorted(s for m in micro_batches for s in m["documents"]) == list(range(len(LENGTHS)))


def test_max_tokens_is_tried_for_every_epoch(tmp_path):
    """A run whose third epoch cannot keep --max_tokens is refused at its start, not after two epochs."""
    options = {"strategy": "random", "num_ranks": 1, "num_slots": 2, "batch_size": 2, "seed": 1}

    def largest(epoch):
        plan = plan_batches(LENGTHS, **options, epoch=epoch)
        return max(sum(LENGTHS[i] for i in slot) for step in plan.steps for rank in step for slot in rank)

    assert max(largest(0), largest(1)) < largest(2)
    changes = {"batching": "random", "tolerance": 0.0, "seed": 1, "max_tokens": max(largest(0), largest(1))}
    train(tmp_path, with_profile=False, num_train_epochs=2, **changes)
    with pytest.raises(UserError, match="max_tokens"):
        train(tmp_path / "three", with_profile=False, num_train_epochs=3, **changes)
    assert not (tmp_path / "three" / "balance.jsonl").exists()


# Checkpoints.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Two epochs with Adam, a checkpoint after every step, refit off."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer, _ = train(folder, **CHECKPOINTED)
    return trainer, folder


CHECKPOINTED = {
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
}
# Inside the first epoch, at its end, inside the second.
RESUME_STEPS = (1, 3, 4, 5)


def planned(line):
    """What the log says was planned, without what was measured."""
    return [
        (m["documents"], m["top_p"], m["top_k"], m["predicted_ms"], line["anchor_ms"], line["epoch"])
        for m in line["micro_batches"]
    ]


@pytest.mark.parametrize("step", RESUME_STEPS)
def test_a_resumed_run_is_the_uninterrupted_one(uninterrupted, tmp_path, step):
    """From any checkpoint the same batches, budgets and, bit for bit, final parameters follow."""
    whole, folder = uninterrupted
    torch.manual_seed(99)
    trainer, recorder = train(tmp_path, resume=str(folder / f"checkpoint-{step}"), **CHECKPOINTED)
    lines, rest = log_of(folder), log_of(tmp_path)
    assert [line["step"] for line in rest] == list(range(step + 1, 2 * STEPS_PER_EPOCH + 1))
    assert list(map(planned, rest)) == list(map(planned, lines[step:]))
    logged = [tuple(m["documents"]) for line in rest for m in line["micro_batches"]]
    assert recorder.micro_batches[-len(logged) :] == logged
    expected = parameters_of(whole.model)
    for name, parameter in parameters_of(trainer.model).items():
        assert torch.equal(parameter, expected[name]), name


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def test_resuming_in_place_logs_each_step_once(uninterrupted, tmp_path):
    """resume_from_checkpoint=True takes the last checkpoint, and steps done again replace their lines in the log."""
    changes = {**CHECKPOINTED, "save_steps": 2}
    train(tmp_path, callbacks=[StopAt(5)], **changes)
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2, 3, 4, 5]
    for checkpoint in tmp_path.glob("checkpoint-5"):  # Trainer may save where it stops
        shutil.rmtree(checkpoint)
    trainer, _ = train(tmp_path, resume=True, **changes)
    whole, folder = uninterrupted
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert list(map(planned, log_of(tmp_path))) == list(map(planned, log_of(folder)))
    assert torch.equal(trainer.model.lm_head.weight, whole.model.lm_head.weight)


@pytest.mark.parametrize("step", (3, 4))
def test_refitting_does_not_move_the_order(tmp_path, step):
    """With refit on, measured times move budgets, but a resumed run still sees the batches of the first one."""
    changes = {**CHECKPOINTED, "refit": True}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "rest", resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **changes)
    whole, rest = ([samples_of(line) for line in log_of(tmp_path / name)] for name in ("whole", "rest"))
    assert rest == whole[step:]


@pytest.mark.parametrize(
    ("text", "match"),
    [(None, "missing"), ("{", "not valid JSON"), ("[]", "balance state"), ('{"learned": {}}', "damaged")],
)
def test_refuses_a_checkpoint_without_its_state(uninterrupted, tmp_path, text, match):
    """A checkpoint whose balance state is missing or damaged is refused, not resumed from a guess."""
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(uninterrupted[1] / "checkpoint-2", checkpoint)
    state = checkpoint / "sparsebalance_state.json"
    state.unlink()
    if text is not None:
        state.write_text(text)
    with pytest.raises(UserError, match=match):
        train(tmp_path / "out", resume=str(checkpoint), **CHECKPOINTED)


def test_refuses_to_resume_from_nothing(tmp_path):
    """resume_from_checkpoint=True without a checkpoint is an error that names the folder."""
    with pytest.raises(UserError, match="no checkpoint"):
        train(tmp_path, resume=True)


# Refusals.


def test_refuses_to_tune_dense_attention(tmp_path):
    """A tolerance with sdpa names both ways out."""
    with pytest.raises(UserError, match="(?s)--tolerance.*sparsebalance.*--tolerance 0"):
        train(tmp_path, build("sdpa"))


@pytest.mark.parametrize("changes", [{"tolerance": 0.0}, {"batching": "random"}])
def test_refuses_to_plan_without_a_profile(tmp_path, changes):
    """sparsity_aware batching, and tuning, each need a profile and say how to get one."""
    with pytest.raises(UserError, match="(?s)--profile.*sparsebalance profile"):
        train(tmp_path, with_profile=False, **changes)


@pytest.mark.parametrize(
    ("content", "match"),
    [(None, "cannot be read"), ("{", "not valid JSON"), ("{}", "format"), ("[]", "object"), ("\x00", "JSON")],
)
def test_refuses_an_unreadable_profile(tmp_path, content, match):
    """A profile that is missing or not one is refused by its path."""
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=match) as error:
        train(tmp_path / "out", with_profile=False, profile=str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "context",
    [
        {"device": "another"},
        {"num_heads": 8},
        {"intermediate_size": 9999},
        {"vocab_size": 9999},
        {"num_threads": 999},
        {"block_size": 128},
        {"attention": "sdpa"},
    ],
)
def test_refuses_a_profile_of_something_else(tmp_path, context):
    """A profile of another device, shape, or setting is refused by what differs."""
    model = build()
    path = write_profile(tmp_path / "profile.json", model, arguments(tmp_path), **context)
    with pytest.raises(UserError, match=f"(?s)--profile.*{next(iter(context))}"):
        train(tmp_path / "out", model, with_profile=False, profile=path)


def test_refuses_less_than_a_global_batch(tmp_path):
    """Fewer documents than one step needs are refused with the numbers."""
    with pytest.raises(UserError, match="(?s)3 samples.*4"):
        train(tmp_path, data=dataset((5, 6, 7)))


@pytest.mark.parametrize("changes", [{}, {"max_steps": 2}])
def test_refuses_streaming(tmp_path, changes):
    """A dataset without known lengths is refused with the way out, whatever else is set."""
    with pytest.raises(UserError, match="map-style"):
        train(tmp_path, data=dataset().to_iterable_dataset(), **changes)


def test_refuses_other_arguments(tmp_path):
    """Plain TrainingArguments are refused by name."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = SparseBalanceTrainer(model=build(), args=args, train_dataset=dataset())
    with pytest.raises(UserError, match="SparseBalanceArguments"):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"anchor": "median"}, "--anchor.*optimal.*median"),
        ({"scope": "node"}, "--scope"),
        ({"batching": "sorted"}, "--batching"),
        ({"tolerance": -0.1}, "--tolerance"),
        ({"tolerance": 1.0}, "--tolerance"),
        ({"tolerance": float("nan")}, "--tolerance"),
        ({"tolerance": 0.6}, "--tolerance.*--base_top_p"),
        ({"base_top_p": 0.0}, "--base_top_p"),
        ({"base_top_p": 1.5}, "--base_top_p"),
        ({"base_top_p": None, "base_top_k": 0}, "--base_top_k"),
        ({"base_top_p": None, "base_top_k": 8.5}, "--base_top_k"),
        ({"base_top_k": 4}, "--base_top_p and --base_top_k"),
        ({"block_size": 0}, "--block_size"),
        ({"anchor": ""}, "--anchor"),
        ({"num_train_epochs": float("nan")}, "--num_train_epochs"),
        ({"num_train_epochs": float("inf")}, "--num_train_epochs"),
        ({"window": 0}, "--window"),
        ({"max_tokens": 0}, "--max_tokens"),
        ({"num_ranks": 0}, "--num_ranks"),
        ({"pipeline_parallel_size": 2, "label_smoothing_factor": 0.1}, "--label_smoothing_factor"),
        ({"pipeline_parallel_size": 2, "fp16": True}, "--fp16"),
        ({"pipeline_parallel_size": 1.5}, "--pipeline_parallel_size"),
        ({"train_sampling_strategy": "group_by_length"}, "--train_sampling_strategy.*--batching"),
        ({"train_sampling_strategy": "batch_rebalance"}, "--train_sampling_strategy.*--batching"),
        ({"ignore_data_skip": True}, "--ignore_data_skip"),
        ({"enable_jit_checkpoint": True}, "--enable_jit_checkpoint"),
        ({"auto_find_batch_size": True}, "--auto_find_batch_size"),
        ({"average_tokens_across_devices": False}, "--average_tokens_across_devices"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_refuses_arguments(tmp_path, changes, match):
    """Each value out of range, and each inherited option that would be ignored, is refused by its name."""
    with pytest.raises(UserError, match=f"(?s){match}"):
        arguments(tmp_path, **changes)


def test_refuses_a_tolerance_that_leaves_nothing_of_the_models_budget(tmp_path):
    """The tolerance is held against the model's own top_p where no --base_top_p is given."""
    config = config_of()
    config.sparse_attention = {"block_size": BLOCK, "top_p": 0.15}
    with pytest.raises(UserError, match="(?s)--tolerance.*0.15"):
        train(tmp_path, build(config=config), base_top_p=None, tolerance=0.2)


@pytest.mark.parametrize("of_model", [False, True])
def test_refuses_to_tune_top_k_by_the_optimal_anchor(tmp_path, of_model):
    """Coverage of a k, given or of the model, is unknown beforehand: anchor optimal is refused, with the ways out."""
    config = config_of()
    config.sparse_attention = {"top_k": 2} if of_model else {}
    with pytest.raises(UserError, match="--anchor optimal.*--anchor mean.*--base_top_p"):
        changes = {} if of_model else {"base_top_k": 2}
        train(tmp_path, build(config=config), base_top_p=None, anchor="optimal", with_profile=False, **changes)


def test_refuses_another_number_of_ranks(tmp_path):
    """--num_ranks 2 with a single process is refused, with the launcher's way out."""
    with pytest.raises(UserError, match="(?s)--num_ranks 2.*--multi_gpu"):
        train(tmp_path, num_ranks=2)
    assert not (tmp_path / "balance.jsonl").exists()


class OwnAttentionConfig(PreTrainedConfig):
    model_type = "own_attention"
    num_attention_heads = 2
    num_hidden_layers = 1
    hidden_size = 32
    vocab_size = VOCAB


class OwnAttention(PreTrainedModel):
    """A language model that never asks transformers' attention interface."""

    config_class = OwnAttentionConfig
    _supports_attention_backend = True
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.head(self.embed(input_ids).cumsum(1))
        loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)


FOREIGN = {
    "own": lambda: OwnAttention._from_config(OwnAttentionConfig(), attn_implementation="sparsebalance"),
    "bloom": lambda: build(config=BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=VOCAB)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_refuses_a_model_that_attends_its_own_way(tmp_path, name):
    """A model that does not call the registered attention is found out at its first step."""
    with pytest.raises(UserError, match="(?s)attention interface.*eager"):
        train(tmp_path, FOREIGN[name](), tolerance=0.0, batching="random", with_profile=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_mixed_precision_trains(tmp_path, dtype, checkpointing):
    """bf16=True trains a model of either dtype; its first loss is fp32 training's up to bf16's rounding."""
    changes = {"tolerance": 0.0, "batching": "random"}
    plain, _ = train(tmp_path / "plain", with_profile=False, **changes)
    model = build(dtype=dtype)
    mixed, _ = train(
        tmp_path / "mixed", model, with_profile=False, bf16=True, gradient_checkpointing=checkpointing, **changes
    )
    # Every activation on the way is rounded to 8 bits once or twice; the loss averages over the tokens.
    assert losses_of(mixed)[0] == pytest.approx(losses_of(plain)[0], rel=2 * torch.finfo(torch.bfloat16).eps)
    assert losses_of(mixed)[-1] < losses_of(mixed)[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 9}, "--seed"),
        ({"window": 1}, "--window"),
        ({"per_device_train_batch_size": 1}, "--per_device_train_batch_size"),
        ({"batching": "random"}, "--batching"),
        ({"max_tokens": 200}, "--max_tokens"),
        ({"base_top_p": 0.7}, "--base_top_p"),
    ],
    ids=str,
)
def test_refuses_to_resume_with_another_order(uninterrupted, tmp_path, changes, named):
    """Resuming with an option that moves documents is refused, naming the option: none would be repeated or lost."""
    checkpoint = next(iter(sorted(Path(uninterrupted[0].args.output_dir).glob("checkpoint-*"))))
    with pytest.raises(UserError, match=named):
        train(tmp_path, resume=str(checkpoint), num_train_epochs=2, **changes)


def test_refuses_to_resume_with_another_profile(uninterrupted, tmp_path):
    """A profile measured anew prices documents anew: resuming with it is refused, it would move them."""
    checkpoint = next(iter(sorted(Path(uninterrupted[0].args.output_dir).glob("checkpoint-*"))))
    model = build()
    args = arguments(tmp_path, num_train_epochs=2)
    path = write_profile(tmp_path / "new.json", model, args)
    profile = LatencyProfile.load(path)
    dataclasses.replace(profile, forward_ms_per_token=2 * profile.forward_ms_per_token + 1.0).save(path)
    with pytest.raises(UserError, match="--profile"):
        train(tmp_path, model, resume=str(checkpoint), with_profile=False, num_train_epochs=2, profile=path)


def test_a_model_whose_layers_are_all_dense_trains(tmp_path):
    """dense_layers may name every layer; nothing is measured then, and training is dense."""
    config = config_of()
    config.sparse_attention = {"block_size": BLOCK, "top_p": BASE_TOP_P, "dense_layers": [0, 1]}
    train(tmp_path, build(config=config), tolerance=0.0, batching="random", with_profile=False)
    assert all(m["density"] is None for line in log_of(tmp_path) for m in line["micro_batches"])


def test_refuses_to_tune_under_max_blocks(tmp_path):
    """Tuning does not know max_blocks, and says so."""
    config = config_of()
    config.sparse_attention = {"block_size": BLOCK, "top_p": BASE_TOP_P, "max_blocks": 2}
    with pytest.raises(UserError, match="max_blocks"):
        train(tmp_path, build(config=config), with_profile=False)
