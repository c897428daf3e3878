"""Evaluates language models: see ``python -m deqseq.tasks.evaluate --help``."""
