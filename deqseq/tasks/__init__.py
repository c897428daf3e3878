"""Tasks: data, training recipes and metrics for models."""
