"""Compiled by numba: the search that solves and rates Sudokus, and the generator of minimal puzzles.

For each digit and each band (a row of boxes), a mask has one bit per cell: whether the digit is a candidate
there. A guess copies all masks to the next depth, so nothing has to be undone. At each depth the search keeps

- ``candidates`` (n, b): the masks of the digits,
- ``placed`` (b,): the masks of the cells whose digit is placed,
- ``missing`` (n, b): how often a digit still has to be placed in a band.

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
    """Constant masks of a board: cells are bits within a band.

    Attributes:
        peers: (C, b): for each cell, one mask per band of the other cells in its row, column and box.
        units: (2b,): one mask for each row and then for each box of a band; the same in every band.
    """

    peers: np.ndarray
    units: np.ndarray


@cache
def geometry(n: int) -> Geometry:
    """The masks for boards of size ``n``, a square number."""
    b = round(n**0.5)
    row, column = np.divmod(np.arange(n * n), n)
    box = row // b * b + column // b
    bit = 1 << np.arange(n * n) % (b * n)
    same = (row[:, None] == row) | (column[:, None] == column) | (box[:, None] == box)
    same &= ~np.eye(n * n, dtype=bool)
    peers = (same * bit).reshape(n * n, b, b * n).sum(axis=2)
    first = bit[: b * n]  # the cells of the first band
    units = [first[index[: b * n] == i].sum() for index in (row, box) for i in range(b)]
    return Geometry(peers, np.array(units))


_LOG = np.zeros(37, np.int64)  # _LOG[2**k % 37] is k: all powers below 2**36 have different remainders
for _k in range(36):
    _LOG[2**_k % 37] = _k


@njit(cache=True, nogil=True)
def _place(candidates, placed, missing, peers, digit, band, bit):
    """Place a digit: remove the cell's other candidates, and the digit from the cell's peers."""
    n, b = candidates.shape
    cell = band * b * n + _LOG[bit % 37]
    for other in range(n):
        candidates[other, band] &= ~bit
    for j in range(b):
        candidates[digit, j] &= ~peers[cell, j]
    candidates[digit, band] |= bit
    placed[band] |= bit
    missing[digit, band] -= 1


@njit(cache=True, nogil=True)
def _naked_singles(candidates, placed, missing, peers):
    """Place the digits of cells with one candidate.

    Returns whether every cell still has a candidate, and whether a digit was placed.
    """
    n, b = candidates.shape
    everything = (1 << (b * n)) - 1
    found = False
    for band in range(b):
        if placed[band] == everything:
            continue
        once, twice = 0, 0
        for digit in range(n):
            mask = candidates[digit, band]
            twice |= once & mask
            once |= mask
        if once != everything:
            return False, found
        singles = once & ~twice & ~placed[band]
        while singles:
            bit = singles & -singles
            singles ^= bit
            digit = 0
            while digit < n and candidates[digit, band] & bit == 0:
                digit += 1
            if digit == n:  # an earlier placement took the candidate
                return False, found
            _place(candidates, placed, missing, peers, digit, band, bit)
            found = True
    return True, found


@njit(cache=True, nogil=True)
def _hidden_singles(candidates, placed, missing, peers, units):
    """Place digits that have one place in a unit: a row, column or box.

    Returns whether every digit still has a place in every unit, and whether a digit was placed.
    """
    n, b = candidates.shape
    found = False
    rows = 0  # mask of a band's first column; rows * m repeats a mask m of columns in every row
    for _ in range(b):
        rows = rows << n | 1
    for digit in range(n):
        if missing[digit].sum() == 0:
            continue
        once, twice = 0, 0  # columns with at least one place for the digit, and with several
        for band in range(b):
            if missing[digit, band]:
                for unit in units:
                    places = candidates[digit, band] & unit
                    if places == 0:
                        return False, found
                    if places & (places - 1) == 0 and places & placed[band] == 0:
                        _place(candidates, placed, missing, peers, digit, band, places)
                        found = True
            mask = candidates[digit, band]
            for _ in range(b):
                row = mask & ((1 << n) - 1)
                twice |= once & row
                once |= row
                mask >>= n
        if once != (1 << n) - 1:
            return False, found
        singles = once & ~twice
        for band in range(b):
            places = candidates[digit, band] & ~placed[band] & (rows * singles)
            while places:
                bit = places & -places
                places ^= bit
                if candidates[digit, band] & bit:
                    _place(candidates, placed, missing, peers, digit, band, bit)
                    found = True
    return True, found


@njit(cache=True, nogil=True)
def _fill_singles(candidates, placed, missing, peers, units):
    """Place naked and hidden singles until none is left.

    Returns whether every cell still has a candidate, and every digit a place in each unit. The result does
    not depend on the order of the deductions.
    """
    found = True
    while found:
        consistent, found = _naked_singles(candidates, placed, missing, peers)
        if consistent and not found:
            consistent, found = _hidden_singles(candidates, placed, missing, peers, units)
        if not consistent:
            return False
    return True


@njit(cache=True, nogil=True)
def _choose(candidates, placed):
    """The band and bit of the first cell with the fewest candidates, among cells without a placed digit.

    The band is -1 if all digits are placed. Cells without one must have at least two candidates.
    """
    n, b = candidates.shape
    fewest, chosen, its = n + 1, -1, 0
    for band in range(b):
        once, twice, thrice = 0, 0, 0
        for digit in range(n):
            mask = candidates[digit, band]
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
                count += candidates[digit, band] & bit != 0
            if count < fewest:
                fewest, chosen, its = count, band, bit
    return chosen, its


@njit(cache=True, nogil=True)
def _read(board, candidates, placed, missing, peers):
    """Set the masks and ``missing`` from a board, whose digits must not contradict each other."""
    n, b = candidates.shape
    everything = (1 << (b * n)) - 1
    placed[:] = 0
    missing[:] = b
    candidates[:] = 0  # for now the cells where a digit is ruled out; inverted below
    cell = 0
    for band in range(b):
        for k in range(b * n):
            if board[cell]:
                digit = board[cell] - 1
                placed[band] |= 1 << k
                missing[digit, band] -= 1
                for j in range(b):
                    candidates[digit, j] |= peers[cell, j]
            cell += 1
    for digit in range(n):
        for band in range(b):
            candidates[digit, band] = everything & ~placed[band] & ~candidates[digit, band]
    cell = 0
    for band in range(b):
        for k in range(b * n):
            if board[cell]:
                candidates[board[cell] - 1, band] |= 1 << k
            cell += 1


@njit(cache=True, nogil=True)
def _write(board, candidates):
    """Write a solution to ``board``: every cell has one candidate left."""
    n, b = candidates.shape
    for cell in range(len(board)):
        for digit in range(n):
            if candidates[digit, cell // (b * n)] >> cell % (b * n) & 1:
                board[cell] = digit + 1


@njit(cache=True, nogil=True)
def _search(candidates, placed, missing, guesses, geometry, state, random):
    """Search for the first solution of the board at depth 0.

    Args:
        candidates: (D, n, b) int64.
        placed: (D, b) int64.
        missing: (D, n, b) int64.
        guesses: (D, 3) int64, for the search's own use: band and bit of a guess, and the digits left to try.
        state: state of the random numbers.
        random: guess digits in random order; otherwise in ascending order.

    Returns:
        The depth of the solution in ``candidates``, or -1 if there is none; and the number of dead ends.
    """
    peers, units = geometry
    n = candidates.shape[1]
    depth, dead_ends = 0, 0
    while True:
        if _fill_singles(candidates[depth], placed[depth], missing[depth], peers, units):
            band, bit = _choose(candidates[depth], placed[depth])
            if band < 0:
                return depth, dead_ends
            guesses[depth] = band, bit, 0
            for digit in range(n):
                if candidates[depth, digit, band] & bit:
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
        candidates[depth] = candidates[depth - 1]
        placed[depth] = placed[depth - 1]
        missing[depth] = missing[depth - 1]
        _place(candidates[depth], placed[depth], missing[depth], peers, digit, band, bit)


@njit(cache=True, nogil=True)
def minimal_puzzles(seed, first, count, rating, geometry):
    """Make ``count`` minimal puzzles and keep those with a rating of at least ``rating``.

    Puzzle i depends only on ``seed`` and ``first + i``. Clues of a random grid are removed in random order. A
    clue stays if there would be a second solution without it. One pass over the clues makes the puzzle
    minimal: a clue that is needed stays needed when more of the other clues are removed.

    Returns:
        Questions (P, C) and answers (P, C), both uint8, and ratings (P,) int64.
    """
    cells, b = geometry.peers.shape
    n = b * b
    questions = np.zeros((count, cells), np.uint8)
    answers = np.zeros((count, cells), np.uint8)
    ratings = np.zeros(count, np.int64)
    state = np.zeros(1, np.uint64)
    candidates = np.empty((cells + 1, n, b), np.int64)
    placed = np.empty((cells + 1, b), np.int64)
    missing = np.empty((cells + 1, n, b), np.int64)
    guesses = np.empty((cells + 1, 3), np.int64)
    order = np.arange(cells)
    kept = 0
    for index in range(first, first + count):
        start(state, seed, index)
        question, answer = questions[kept], answers[kept]
        question[:] = 0
        _read(question, candidates[0], placed[0], missing[0], geometry.peers)
        depth, _ = _search(candidates, placed, missing, guesses, geometry, state, True)
        _write(answer, candidates[depth])
        question[:] = answer
        order[:] = np.arange(cells)
        shuffle(state, order)
        for cell in order:
            question[cell] = 0
            _read(question, candidates[0], placed[0], missing[0], geometry.peers)
            candidates[0, answer[cell] - 1, cell // (b * n)] &= ~(1 << cell % (b * n))
            depth, _ = _search(candidates, placed, missing, guesses, geometry, state, False)
            if depth >= 0:  # without this clue, there is a second solution
                question[cell] = answer[cell]
        _read(question, candidates[0], placed[0], missing[0], geometry.peers)
        _, dead_ends = _search(candidates, placed, missing, guesses, geometry, state, False)
        if dead_ends >= rating:
            ratings[kept] = dead_ends
            kept += 1
    return questions[:kept], answers[:kept], ratings[:kept]
