"""The data of language modelling: documents, shards of their tokens, rows of a fixed length."""

from deqseq.tasks.common.corpus.holdout import HoldOut, Split
from deqseq.tasks.common.corpus.rows import StreamedRows, TokenFolder

__all__ = ["HoldOut", "Split", "StreamedRows", "TokenFolder"]
