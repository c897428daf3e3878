"""The search that solves and rates Sudokus, and the generator of minimal puzzles. numba compiles this module.

A band is a row of boxes. A mask is an integer with one bit for each cell of a band. A guess copies all masks
to the next depth of the search, so a wrong guess needs no undoing. At each depth the search keeps two arrays:

- ``candidates`` (b, n): for each band and digit, the mask of the cells where the digit is a candidate.
  A placed digit stays the only candidate of its cell.
- ``placed`` (b,): for each band, the mask of the cells whose digit is placed.

The loops that look for singles go through the digits of a band without branches. So the compiler can process
several digits at a time.

Shapes: n the size (cells along a side), C = n² cells, D = C + 1 depths. A board has b = √n bands, and a band
has b rows of cells. A board (C,) uint8 has the digits in reading order, 0 for an empty cell. Bit k of band j
is cell j·b·n + k.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import njit

from deqseq.tasks.reasoning.random_numbers import below, shuffle, start


class Geometry(NamedTuple):
    """The constant masks of a board. A mask has one bit for each cell of a band.

    Attributes:
        peers: (C, b), for each cell and band, the mask of the cell's peers in this band. The peers are the
            other cells in the cell's row, column and box.
        units: the masks of the b rows of a band, then the masks of its b boxes. All bands have equal masks.
            numba compiles the search for each length of this tuple, so that n and b are constants.
    """

    peers: np.ndarray
    units: tuple[int, ...]


@cache
def geometry(n: int) -> Geometry:
    """The masks for boards of size ``n``, 4 or 9."""
    b = round(n**0.5)
    row, column = np.divmod(np.arange(n * n), n)
    box = row // b * b + column // b
    bit = 1 << np.arange(n * n) % (b * n)
    same = (row[:, None] == row) | (column[:, None] == column) | (box[:, None] == box)
    same &= ~np.eye(n * n, dtype=bool)
    peers = (same * bit).reshape(n * n, b, b * n).sum(axis=2)
    first = bit[: b * n]  # the cells of the first band
    units = tuple(int(first[index[: b * n] == i].sum()) for index in (row, box) for i in range(b))
    return Geometry(peers, units)


_LOG = np.zeros(37, np.int64)  # _LOG[2**k % 37] is k; 2**0 to 2**35 have different remainders
for _k in range(36):
    _LOG[2**_k % 37] = _k


@njit(cache=True, nogil=True)
def _size(geometry):
    """n and b, the size of the board and of its boxes."""
    b = len(geometry.units) // 2
    return b * b, b


@njit(cache=True, nogil=True)
def _place(candidates, placed, geometry, band, digit, bit):
    """Place ``digit`` in one cell: the cell of ``band`` whose mask is ``bit``.

    Removes all other candidates of this cell. Removes the digit from the candidates of the cell's peers: the
    cells in its row, column and box.
    """
    n, b = _size(geometry)
    cell = band * b * n + _LOG[bit % 37]
    for other in range(n):
        candidates[band, other] &= ~bit
    for j in range(b):
        candidates[j, digit] &= ~geometry.peers[cell, j]
    candidates[band, digit] |= bit
    placed[band] |= bit


@njit(cache=True, nogil=True)
def _place_singles(candidates, placed, geometry, band, digit, singles):
    """Place ``digit`` in the cells of the mask ``singles``, where it is still a candidate."""
    while singles:
        bit = singles & -singles
        singles ^= bit
        if candidates[band, digit] & bit:  # otherwise an earlier placement has removed it
            _place(candidates, placed, geometry, band, digit, bit)


@njit(cache=True, nogil=True)
def _naked_singles(candidates, placed, geometry):
    """Fill naked singles: cells that have only one candidate.

    Returns two booleans. The first is false if a cell without a candidate was found. The second tells whether
    a digit was placed.
    """
    n, b = _size(geometry)
    everything = (1 << (b * n)) - 1
    found = False
    for band in range(b):
        if placed[band] == everything:
            continue
        once, twice = 0, 0  # cells with at least one, and at least two, candidates
        for digit in range(n):
            mask = candidates[band, digit]
            twice |= once & mask
            once |= mask
        if once != everything:
            return False, found
        singles = once & ~twice & ~placed[band]
        if singles:
            found = True
            for digit in range(n):
                _place_singles(candidates, placed, geometry, band, digit, candidates[band, digit] & singles)
    return True, found


@njit(cache=True, nogil=True)
def _hidden_singles(candidates, placed, geometry, memory):
    """Fill hidden singles: cells that are the only possible cell for a digit in a row, column or box.

    Returns two booleans. The first is false if a row, column or box was found that has no possible cell for a
    digit. The second tells whether a digit was placed. ``memory`` (2, n) int64 is working memory.
    """
    n, b = _size(geometry)
    everything, row = (1 << (b * n)) - 1, (1 << n) - 1
    rows = 0  # mask of a band's first column; rows * m copies a row's mask m to all rows of the band
    for _ in range(b):
        rows = rows << n | 1
    # For each digit, the columns with at least one, and at least two, possible cells.
    once, twice = memory[0], memory[1]
    for digit in range(n):
        once[digit], twice[digit] = 0, 0
    for band in range(b):
        for i in range(b):
            for digit in range(n):
                mask = candidates[band, digit] >> (n * i) & row
                twice[digit] |= once[digit] & mask
                once[digit] |= mask
    # Overwrite both with masks of cells: columns with one possible cell; singles of a band, filled ones too.
    columns, singles = memory[0], memory[1]
    every = row
    for digit in range(n):
        every &= once[digit]
        columns[digit] = rows * (once[digit] & ~twice[digit])
    if every != row:
        return False, False
    found = False
    for band in range(b):
        if placed[band] == everything:
            continue
        for digit in range(n):
            singles[digit] = candidates[band, digit] & columns[digit]
        impossible = False
        for unit in geometry.units:
            for digit in range(n):
                places = candidates[band, digit] & unit
                impossible |= places == 0
                singles[digit] |= places if places & (places - 1) == 0 else 0
        if impossible:
            return False, found
        for digit in range(n):
            left = singles[digit] & ~placed[band]
            found |= left != 0
            _place_singles(candidates, placed, geometry, band, digit, left)
    return True, found


@njit(cache=True, nogil=True)
def _fill_singles(candidates, placed, geometry, memory):
    """Fill naked and hidden singles until none is left.

    Returns whether every cell still has a candidate, and every digit still has a possible cell in every row,
    column and box. The result does not depend on the order in which singles are filled.
    """
    found = True
    while found:
        consistent, found = _naked_singles(candidates, placed, geometry)
        if consistent and not found:
            consistent, found = _hidden_singles(candidates, placed, geometry, memory)
        if not consistent:
            return False
    return True


@njit(cache=True, nogil=True)
def _choose(candidates, placed, geometry):
    """Find the cell to guess: among the cells without a placed digit, the first with the fewest candidates.

    Returns the band and the bit of the cell. The band is -1 if all digits are placed. Cells without a placed
    digit must have at least two candidates.
    """
    n, b = _size(geometry)
    fewest, chosen, its = n + 1, -1, 0
    for band in range(b):
        once, twice, thrice = 0, 0, 0
        for digit in range(n):
            mask = candidates[band, digit]
            thrice |= twice & mask
            twice |= once & mask
            once |= mask
        pairs = twice & ~thrice
        if pairs:
            return band, pairs & -pairs
        left = ((1 << (b * n)) - 1) & ~placed[band]
        while left:
            bit = left & -left
            left ^= bit
            count = 0
            for digit in range(n):
                count += candidates[band, digit] & bit != 0
            if count < fewest:
                fewest, chosen, its = count, band, bit
    return chosen, its


@njit(cache=True, nogil=True)
def _read(board, candidates, placed, geometry):
    """Set ``candidates`` and ``placed`` from a board. Its digits must keep the rules."""
    n, b = _size(geometry)
    everything = (1 << (b * n)) - 1
    placed[:] = 0
    candidates[:] = 0  # first collects the cells where a digit is ruled out; inverted below
    cell = 0
    for band in range(b):
        for k in range(b * n):
            if board[cell]:
                digit = board[cell] - 1
                placed[band] |= 1 << k
                for j in range(b):
                    candidates[j, digit] |= geometry.peers[cell, j]
            cell += 1
    for digit in range(n):
        for band in range(b):
            candidates[band, digit] = everything & ~placed[band] & ~candidates[band, digit]
    cell = 0
    for band in range(b):
        for k in range(b * n):
            if board[cell]:
                candidates[band, board[cell] - 1] |= 1 << k
            cell += 1


@njit(cache=True, nogil=True)
def _write(board, candidates, geometry):
    """Write the solution to ``board``. Every cell must have exactly one candidate left."""
    n, b = _size(geometry)
    for cell in range(len(board)):
        for digit in range(n):
            if candidates[cell // (b * n), digit] >> cell % (b * n) & 1:
                board[cell] = digit + 1


@njit(cache=True, nogil=True)
def _search(candidates, placed, guesses, geometry, state, random):
    """Search for the first solution of the board at depth 0.

    Args:
        candidates: (D, b, n) int64.
        placed: (D, b) int64.
        guesses: (D, 3) int64, working memory. For each depth, the band and the bit of the guessed cell, and
            the mask of the digits that are left to try.
        state: state of the random numbers.
        random: if true, guess digits in random order; otherwise in ascending order.

    Returns:
        The depth at which ``candidates`` has the solution (-1 if there is no solution), and the number of
        dead ends.
    """
    n, b = _size(geometry)
    memory = np.empty((2, n), np.int64)
    depth, dead_ends = 0, 0
    while True:
        if _fill_singles(candidates[depth], placed[depth], geometry, memory):
            band, bit = _choose(candidates[depth], placed[depth], geometry)
            if band < 0:
                return depth, dead_ends
            guesses[depth] = band, bit, 0
            for digit in range(n):
                if candidates[depth, band, digit] & bit:
                    guesses[depth, 2] |= 1 << digit
            depth += 1
        else:
            dead_ends += 1
        while depth and guesses[depth - 1, 2] == 0:
            depth -= 1
        if depth == 0:
            return -1, dead_ends
        band, bit, left = guesses[depth - 1]
        digit, skipped = -1, 0
        if random:
            count = 0
            for k in range(n):
                count += left >> k & 1
            skipped = below(state, count)
        while skipped >= 0:
            digit += 1
            skipped -= left >> digit & 1
        guesses[depth - 1, 2] ^= 1 << digit
        for j in range(b):  # numba compiles loops faster than assignments of arrays
            placed[depth, j] = placed[depth - 1, j]
            for other in range(n):
                candidates[depth, j, other] = candidates[depth - 1, j, other]
        _place(candidates[depth], placed[depth], geometry, band, digit, bit)


@njit(cache=True, nogil=True)
def minimal_puzzles(seed, first, count, rating, geometry):
    """Make ``count`` minimal puzzles and keep the P puzzles with a rating of at least ``rating``.

    The rating is the number of dead ends of the search that guesses digits in ascending order.

    Puzzle i depends only on ``seed`` and ``first + i``. It starts as a full random grid. Its clues are
    removed in random order. A clue stays if there would be a second solution without it. One pass over the
    clues is enough to make the puzzle minimal, because a needed clue is still needed after other clues are
    removed.

    Returns:
        Questions (P, C) and answers (P, C), both uint8, and ratings (P,) int64.
    """
    n, b = _size(geometry)
    cells = n * n
    questions = np.zeros((count, cells), np.uint8)
    answers = np.zeros((count, cells), np.uint8)
    ratings = np.zeros(count, np.int64)
    state = np.zeros(1, np.uint64)
    candidates = np.empty((cells + 1, b, n), np.int64)
    placed = np.empty((cells + 1, b), np.int64)
    guesses = np.empty((cells + 1, 3), np.int64)
    order = np.arange(cells)
    kept = 0
    for index in range(first, first + count):
        start(state, seed, index)
        question, answer = questions[kept], answers[kept]
        question[:] = 0
        _read(question, candidates[0], placed[0], geometry)
        depth, _ = _search(candidates, placed, guesses, geometry, state, True)
        _write(answer, candidates[depth], geometry)
        question[:] = answer
        order[:] = np.arange(cells)
        shuffle(state, order)
        for cell in order:
            question[cell] = 0
            _read(question, candidates[0], placed[0], geometry)
            # Without the digit of the answer in this cell, any solution is a second solution.
            candidates[0, cell // (b * n), answer[cell] - 1] &= ~(1 << cell % (b * n))
            depth, _ = _search(candidates, placed, guesses, geometry, state, False)
            if depth >= 0:  # there is a second solution without this clue, so put it back
                question[cell] = answer[cell]
        _read(question, candidates[0], placed[0], geometry)
        _, dead_ends = _search(candidates, placed, guesses, geometry, state, False)
        if dead_ends >= rating:
            ratings[kept] = dead_ends
            kept += 1
    return questions[:kept], answers[:kept], ratings[:kept]
