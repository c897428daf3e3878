"""Pretraining of language models: see ``python -m deqseq.tasks.pretrain --help``."""
