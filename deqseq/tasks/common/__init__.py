"""What tasks share: command lines, runs, the trainer, tables, figures and data."""
