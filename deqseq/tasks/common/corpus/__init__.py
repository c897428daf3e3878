"""Data for language models: reads documents, writes tokens to shards, and makes rows of fixed length."""

from deqseq.tasks.common.corpus.holdout import HoldOut, Split
from deqseq.tasks.common.corpus.rows import StreamedRows, TokenFolder

__all__ = ["HoldOut", "Split", "StreamedRows", "TokenFolder"]
