"""Evaluation of language models: perplexity, lengths, iterations, windows and downstream tasks."""
