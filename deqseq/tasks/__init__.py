"""Tasks: the data, the metrics and the recipes that models are trained and judged on."""
