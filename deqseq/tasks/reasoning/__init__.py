"""Reasoning: Sudokus and mazes, whose answers have to satisfy many constraints at once."""
