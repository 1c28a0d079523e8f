"""Balanced block-sparse fine-tuning for transformers; importing it registers ``attn_implementation="sparsebalance"``."""

from hf_sparsebalance.attention import StatsCollector, register
from hf_sparsebalance.version import __version__
from sparsebalance_kernels import block_sparse_attention

register()

__all__ = ["StatsCollector", "__version__", "block_sparse_attention"]
