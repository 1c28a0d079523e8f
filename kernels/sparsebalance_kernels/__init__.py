"""Block-sparse attention for packed documents: one operator, several backends, no transformers.

``block_sparse_attention`` is the operator; ``select_blocks`` and ``attend`` are its two halves, joined by
``BlockSelection``: another selector may feed the same attention.  ``reference`` holds the slow oracle of the tests.
"""

from sparsebalance_kernels.api import attend, block_sparse_attention, select_blocks
from sparsebalance_kernels.selection import CURVE_TOP_K, CURVE_TOP_P, AttentionStats, BlockSelection, Budget

__all__ = [
    "CURVE_TOP_K",
    "CURVE_TOP_P",
    "AttentionStats",
    "BlockSelection",
    "Budget",
    "attend",
    "block_sparse_attention",
    "select_blocks",
]
