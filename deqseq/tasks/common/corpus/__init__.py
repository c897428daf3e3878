"""Data for language modelling: documents, shards of tokens, and rows with a fixed number of tokens."""

from deqseq.tasks.common.corpus.holdout import HoldOut, Split
from deqseq.tasks.common.corpus.rows import StreamedRows, TokenFolder

__all__ = ["HoldOut", "Split", "StreamedRows", "TokenFolder"]
