"""Two tuned epochs with refit on, two of a top_k, a LoRA run; the planner's state tells what each rank believes."""

import job_setup
import tiny_run
import torch
from peft import LoraConfig, get_peft_model

from hf_sparsebalance.trainer import SparseBalanceMixin

out = job_setup.out_folder()
planners = []
set_up = SparseBalanceMixin._set_up_balance


def remember(trainer):
    """Keeps the planner of each run."""
    balance, sampler = set_up(trainer)
    planners.append(balance.planner)
    return balance, sampler


SparseBalanceMixin._set_up_balance = remember

args = job_setup.arguments(out / "tuned", num_train_epochs=2, num_ranks=2)
rank = args.process_index
model = job_setup.build_model()
args.profile = tiny_run.write_profile(out / f"profile-of-rank-{rank}.json", model, args)
trainer, recorder = job_setup.train(model, args)
job_setup.report(
    "tuned",
    micro_batches=recorder.micro_batches,
    budgets=recorder.budgets,
    parameters=recorder.parameters[-1],
    plans=[planners[0].batches(epoch).steps for epoch in (1,)],
    state=planners[0].state_dict(),
    log=[entry for entry in trainer.state.log_history if "loss" in entry],
)

args = job_setup.arguments(out / "top_k", num_train_epochs=2, base_top_p=None, base_top_k=5, tolerance=0.05)
args.profile = tiny_run.write_profile(out / f"profile-of-rank-{rank}.json", model, args)
trainer, recorder = job_setup.train(job_setup.build_model(), args)
job_setup.report("top_k", budgets=recorder.budgets, parameters=recorder.parameters[-1], state=planners[1].state_dict())

torch.manual_seed(1)
# As in the SparseBalance paper (arXiv 2604.13847).
adapters = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
adapted = get_peft_model(job_setup.build_model(), adapters)
args = job_setup.arguments(out / "lora", learning_rate=0.5, save_strategy="epoch")
args.profile = tiny_run.write_profile(out / f"profile-of-rank-{rank}.json", adapted, args)
trainer, recorder = job_setup.train(adapted, args)
trainer.save_model()
with torch.no_grad():
    adapted.eval()
    logits = adapted(input_ids=torch.tensor([job_setup.documents()[0]])).logits.tolist()
job_setup.report("lora", parameters=recorder.parameters, logits=logits)
