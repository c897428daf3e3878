"""Verifies puzzles with solvers in plain Python, which share no code with the generators."""

from collections.abc import Iterator, Sequence
from functools import cache
from math import isqrt
from typing import NamedTuple

from tqdm.auto import tqdm

from deqseq.tasks.reasoning.puzzles import (
    GOAL,
    PATH,
    START,
    WALL,
    Puzzles,
    Task,
    broken_rules,
    check_task,
    size_of,
)


def verify(
    task: Task, puzzles: Puzzles, *, minimal: bool = True, rated: bool = True, progress: bool = False
) -> None:
    """Solve every puzzle again and check its answer.

    A Sudoku must have exactly one solution, and its answer must be this solution. A maze must be perfect: it
    has exactly one path between any two free cells. Its answer must mark the path from start to goal.

    Args:
        minimal: also check that a Sudoku needs every clue. If any single clue is removed, there must be
            several solutions. This check takes most of the time.
        rated: also check the ratings. For a Sudoku, the rating is the number of dead ends that
            :func:`solve_sudoku` meets. For a maze, it is the length of the path. Set ``False`` for the
            Sudokus of sudoku-extreme, because another solver rated them.
        progress: show a progress bar.

    Raises:
        ValueError: a puzzle is wrong. The message names the first wrong puzzle, counted from 1, and the rule
            that it breaks.
    """
    check_task(task)
    broken = dict(broken_rules(task, puzzles)[:1])
    rows = zip(*(column.tolist() for column in puzzles), strict=True)
    total = len(puzzles.ratings)
    for index, (question, answer, rating) in enumerate(
        tqdm(rows, "verify", total, leave=False, disable=None if progress else True)
    ):
        fault = broken.get(index)
        if not fault and task == "sudoku":
            fault = _sudoku_fault(question, answer, rating if rated else None, minimal)
        elif not fault:
            fault = _maze_fault(question, answer, rating if rated else None)
        if fault:
            raise ValueError(f"puzzle {index + 1}: {fault}")


class Solved(NamedTuple):
    """Result of :func:`solve_sudoku`.

    Attributes:
        solutions: the solutions found, as lists of digits.
        dead_ends: number of dead ends before the first solution, or of all dead ends if there is none.
    """

    solutions: list[list[int]]
    dead_ends: int


def solve_sudoku(board: Sequence[int], limit: int = 2) -> Solved:
    """Search for up to ``limit`` solutions of a Sudoku. ``board``: n² digits, 0 for empty cells.

    The search also counts dead ends: boards with a cell that has no candidate, or with a digit that has no
    place in a row, column or box. :func:`deqseq.tasks.reasoning.sudoku.generate` describes the search.
    """
    n = size_of("sudoku", len(board))
    candidates = [(1 << n) - 1] * len(board)
    solutions: list[list[int]] = []
    before, dead_ends = 0, [0]
    if not all(_assign(candidates, cell, 1 << (digit - 1)) for cell, digit in enumerate(board) if digit):
        return Solved([], 1)
    for solution in _search(candidates, dead_ends):
        if not solutions:
            before = dead_ends[0]
        solutions.append([mask.bit_length() for mask in solution])
        if len(solutions) == limit:
            break
    return Solved(solutions, before if solutions else dead_ends[0])


@cache
def _units(n: int) -> list[list[list[int]]]:
    """The three units of each cell, as lists of cells: its row, its column and its box."""
    b = isqrt(n)
    cells = [(row, column) for row in range(n) for column in range(n)]
    keys = [[("row", r), ("column", c), ("box", (r // b, c // b))] for r, c in cells]
    members: dict[object, list[int]] = {}
    for cell, names in enumerate(keys):
        for name in names:
            members.setdefault(name, []).append(cell)
    return [[members[name] for name in names] for names in keys]


def _assign(candidates: list[int], cell: int, bit: int) -> bool:
    """Make the digit ``bit`` the only candidate of a cell. Returns whether the board is still consistent.

    ``bit`` is ``1 << (digit - 1)``. Each entry of ``candidates`` is a sum of such bits.
    """
    others = candidates[cell] & ~bit
    while others:
        other = others & -others
        others ^= other
        if not _eliminate(candidates, cell, other):
            return False
    return bool(candidates[cell] & bit)


def _eliminate(candidates: list[int], cell: int, bit: int) -> bool:
    """Remove the candidate ``bit`` from a cell, then fill all cells whose digit is now certain.

    Returns whether the board is still consistent.
    """
    if not candidates[cell] & bit:
        return True
    candidates[cell] ^= bit
    rest = candidates[cell]
    if not rest:
        return False
    units = _units(isqrt(len(candidates)))[cell]
    if rest & (rest - 1) == 0:
        for unit in units:
            for peer in unit:
                if peer != cell and not _eliminate(candidates, peer, rest):
                    return False
    for unit in units:
        places = [place for place in unit if candidates[place] & bit]
        if not places or (len(places) == 1 and not _assign(candidates, places[0], bit)):
            return False
    return True


def _search(candidates: list[int], dead_ends: list[int]) -> Iterator[list[int]]:
    """Yield all solutions. Adds 1 to ``dead_ends[0]`` at every dead end."""
    open_cells = [cell for cell, mask in enumerate(candidates) if mask & (mask - 1)]
    if not open_cells:
        yield candidates
        return
    cell = min(open_cells, key=lambda cell: candidates[cell].bit_count())
    for digit in range(candidates[cell].bit_length()):
        if candidates[cell] >> digit & 1:
            copy = candidates.copy()
            if _assign(copy, cell, 1 << digit):
                yield from _search(copy, dead_ends)
            else:
                dead_ends[0] += 1


def _sudoku_fault(question: list[int], answer: list[int], rating: int | None, minimal: bool) -> str | None:
    solved = solve_sudoku(question)
    if solved.solutions != [answer]:
        return "its answer must be its only solution"
    if rating is not None and rating != solved.dead_ends:
        return f"its rating must be {solved.dead_ends}, got {rating}"
    clues = [cell for cell, digit in enumerate(question) if digit] if minimal else []
    for cell in clues:
        fewer = [*question[:cell], 0, *question[cell + 1 :]]
        if len(solve_sudoku(fewer).solutions) == 1:
            row, column = divmod(cell, isqrt(len(question)))
            return f"is not minimal: row {row + 1}, column {column + 1} needs no clue"
    return None


def _maze_fault(question: list[int], answer: list[int], length: int | None) -> str | None:
    """The first rule that a maze breaks, or ``None``.

    To find the path, the function fills dead ends until only the path is left.
    """
    n = size_of("maze", len(question))
    cells = {divmod(i, n) for i, token in enumerate(question) if token != WALL}
    ends = {divmod(i, n) for i, token in enumerate(question) if token in (START, GOAL)}
    if any(row in (0, n - 1) or column in (0, n - 1) for row, column in cells):
        return "its border must be walls"
    last = 2 * ((n - 1) // 2)
    if not cells >= {(row, column) for row in range(1, last, 2) for column in range(1, last, 2)}:
        return "every cell at an odd row and column must be free"

    def neighbours(cell: tuple[int, int]) -> set[tuple[int, int]]:
        row, column = cell
        return {(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)} & cells

    reached, todo = set(), [next(iter(cells))]
    while todo:
        cell = todo.pop()
        if cell not in reached:
            reached.add(cell)
            todo.extend(neighbours(cell))
    doors = sum(len(neighbours(cell)) for cell in cells) // 2
    if reached != cells or doors != len(cells) - 1:
        return "is not perfect: two cells must have exactly one path between them"

    todo = list(cells)
    while todo:
        cell = todo.pop()
        if cell in cells and cell not in ends and len(around := neighbours(cell)) <= 1:
            cells.discard(cell)
            todo.extend(around)
    path = {divmod(i, n) for i, token in enumerate(answer) if token == PATH}
    if path != cells - ends:
        return "its answer must mark the path from start to goal"
    if length is not None and length != len(path) + 1:
        return f"its rating must be {len(path) + 1}, the steps of its path, got {length}"
    return None
