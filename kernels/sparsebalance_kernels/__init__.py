"""Block-sparse attention for packed documents: one operator, several backends, no transformers.

``block_sparse_attention`` is the operator; ``select`` and ``attend`` (ops.py) are its two halves, joined by
``BlockSelection``.  ``reference`` holds the slow oracle that the tests compare with.
"""

from sparsebalance_kernels.api import block_sparse_attention
from sparsebalance_kernels.selection import CURVE_TOP_K, CURVE_TOP_P, AttentionStats, BlockSelection, Budget

__all__ = [
    "CURVE_TOP_K",
    "CURVE_TOP_P",
    "AttentionStats",
    "BlockSelection",
    "Budget",
    "block_sparse_attention",
]
