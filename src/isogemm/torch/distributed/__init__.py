"""Several processes, one result: the bits do not depend on how many ranks a model or a batch is spread over.

A sum that is cut between ranks is a tree whose leaves do not depend on their number (`Ranks.order`). A rank computes
its subtree in float32 by a contract of its own, torch.distributed carries it, and the ranks' sums meet in the upper
levels of the same tree before the one rounding.
"""

from __future__ import annotations

from .data import GradientTree, tree_hook
from .layers import ColumnParallel, HeadNorm, RowParallel, VocabularyEmbedding
from .loss import log_softmax, token_losses
from .ranks import Ranks
from .shards import load_shards, without_weights
from .traffic import Transfer, traffic

__all__ = [
    "ColumnParallel",
    "GradientTree",
    "HeadNorm",
    "Ranks",
    "RowParallel",
    "Transfer",
    "VocabularyEmbedding",
    "load_shards",
    "log_softmax",
    "token_losses",
    "traffic",
    "tree_hook",
    "without_weights",
]
