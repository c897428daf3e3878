"""Compiled by numba: carves perfect mazes, and chooses a start and a goal at a given distance.

Shapes: n the size of a board, C = n² cells.
"""

import numpy as np
from numba import njit

from deqseq.tasks.reasoning.puzzles import FREE, GOAL, PATH, START, WALL
from deqseq.tasks.reasoning.random_numbers import below, start

_STARTS, _MAZES = 16, 1000  # starts to try in a maze, and mazes to try for a length


@njit(cache=True, nogil=True)
def _carve(board, n, stack, state):
    """Carve a random perfect maze into ``board`` (C,) by depth-first search. ``stack``: (C,) int64.

    Rooms are at odd rows and columns. A maze of even size has a second wall at its right and bottom edge.
    """
    board[:] = WALL
    rooms = (n - 1) // 2
    steps = (-n, n, -1, 1)
    stack[0] = (2 * below(state, rooms) + 1) * n + 2 * below(state, rooms) + 1
    board[stack[0]] = FREE
    height = 1
    while height:
        room = stack[height - 1]
        row, column = room // n, room % n
        inside = (row > 1, row < 2 * rooms - 1, column > 1, column < 2 * rooms - 1)
        count, chosen = 0, 0
        for k in range(4):
            if inside[k] and board[room + 2 * steps[k]] == WALL:
                count += 1
                if below(state, count) == 0:  # each of the neighbours is chosen with the same probability
                    chosen = steps[k]
        if count == 0:
            height -= 1
            continue
        board[room + chosen] = FREE
        board[room + 2 * chosen] = FREE
        stack[height] = room + 2 * chosen
        height += 1


@njit(cache=True, nogil=True)
def _walk(board, n, queue, distance, parent):
    """Set the distances (C,) of all cells from ``queue[0]``, and their parents (C,). Returns their number."""
    distance[:] = -1
    distance[queue[0]] = 0
    head, tail = 0, 1
    while head < tail:
        cell = queue[head]
        head += 1
        for step in (-n, n, -1, 1):  # the border is wall, so no step leaves the board
            if board[cell + step] == FREE and distance[cell + step] < 0:
                distance[cell + step] = distance[cell] + 1
                parent[cell + step] = cell
                queue[tail] = cell + step
                tail += 1
    return tail


@njit(cache=True, nogil=True)
def perfect_mazes(seed, first, count, n, shortest, longest):
    """Make ``count`` perfect mazes. Maze i depends only on ``seed``, ``first + i`` and the other arguments.

    The length of the path is drawn first, uniformly from ``shortest`` to ``longest``. Then mazes are carved,
    and random starts are tried, until there is a goal at this distance. The goal is random among those.

    Returns:
        Questions (P, C) and answers (P, C), both uint8, and lengths (P,) int64. If no path of a length is
        found, the last length is negative, and its maze is unfinished.
    """
    cells = n * n
    questions = np.empty((count, cells), np.uint8)
    answers = np.empty((count, cells), np.uint8)
    lengths = np.empty(count, np.int64)
    state = np.zeros(1, np.uint64)
    queue, distance, parent = np.empty((3, cells), np.int64)
    opened = 2 * ((n - 1) // 2) ** 2 - 1  # rooms, and the doors between them
    for i in range(count):
        start(state, seed, first + i)
        question, answer = questions[i], answers[i]
        length = shortest + below(state, longest - shortest + 1)
        lengths[i] = -length
        for attempt in range(_STARTS * _MAZES):
            if attempt % _STARTS == 0:
                _carve(question, n, queue, state)
            number = below(state, opened)
            for cell in range(cells):
                if question[cell] == FREE:
                    number -= 1
                    if number < 0:
                        queue[0] = cell
                        break
            begin = queue[0]
            goal, goals = -1, 0
            for k in range(_walk(question, n, queue, distance, parent)):
                if distance[queue[k]] == length:
                    goals += 1
                    if below(state, goals) == 0:
                        goal = queue[k]
            if goals:
                question[begin] = START
                question[goal] = GOAL
                answer[:] = question
                cell = parent[goal]
                while cell != begin:
                    answer[cell] = PATH
                    cell = parent[cell]
                lengths[i] = length
                break
        if lengths[i] < 0:
            return questions[: i + 1], answers[: i + 1], lengths[: i + 1]
    return questions, answers, lengths
