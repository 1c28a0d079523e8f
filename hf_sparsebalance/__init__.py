"""Balanced block-sparse fine-tuning for transformers.

Importing it makes ``attn_implementation="sparsebalance"`` known to transformers.
"""

from hf_sparsebalance.arguments import SparseBalanceArguments
from hf_sparsebalance.attention import StatsCollector, register
from hf_sparsebalance.batching import BatchPlan, plan_batches
from hf_sparsebalance.callback import SparseBalanceCallback
from hf_sparsebalance.density import DensityCurve
from hf_sparsebalance.documents import load_documents
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.latency import Latency, LatencyPredictor
from hf_sparsebalance.latency_profile import LatencyProfile
from hf_sparsebalance.report import balance_share, draw_timeline, read_run, render_table, summarise
from hf_sparsebalance.schedule import simulate_step
from hf_sparsebalance.trainer import SparseBalanceMixin, SparseBalanceTrainer
from hf_sparsebalance.tuning import MicroBatch, tune_sparsity, tune_top_k
from hf_sparsebalance.version import __version__
from sparsebalance_kernels import block_sparse_attention

register()

__all__ = [
    "BatchPlan",
    "DensityCurve",
    "Latency",
    "LatencyPredictor",
    "LatencyProfile",
    "MicroBatch",
    "SparseBalanceArguments",
    "SparseBalanceCallback",
    "SparseBalanceMixin",
    "SparseBalanceTrainer",
    "StatsCollector",
    "UserError",
    "__version__",
    "balance_share",
    "block_sparse_attention",
    "draw_timeline",
    "load_documents",
    "plan_batches",
    "read_run",
    "render_table",
    "simulate_step",
    "summarise",
    "tune_sparsity",
    "tune_top_k",
]
