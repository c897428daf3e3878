"""Code that the tasks share: command lines, run folders, the trainer, tables, figures and data."""
