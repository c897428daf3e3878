"""Carves perfect mazes, and chooses a start and a goal at a given distance. numba compiles this module.

A maze is perfect if it has one path between any two free cells. Free cells are rooms and doors. Rooms are at
odd rows and columns, counted from 0. A door is a cell between two neighbouring rooms.

Shapes: P puzzles, n cells along a side of a board, C = n² cells.
"""

import numpy as np
from numba import njit

from deqseq.tasks.reasoning.puzzles import FREE, GOAL, PATH, START, WALL
from deqseq.tasks.reasoning.random_numbers import below, start

_STARTS, _MAZES = 16, 1000  # starts to try in each maze, and mazes to try for each path length


@njit(cache=True, nogil=True)
def _carve(board, n, stack, state):
    """Carve a random perfect maze into ``board`` (C,) by depth-first search.

    A maze of even size has walls two cells thick at its right and bottom edges. ``stack`` (C,) int64 is
    working memory: it holds the rooms on the way to the current room.
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
                if below(state, count) == 0:  # choose among uncarved neighbours uniformly
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
    """Breadth-first search from the cell ``queue[0]``. Returns the number of cells reached.

    Writes three arrays (C,):

    - ``queue``: the reached cells, in the order in which they are reached.
    - ``distance``: for every cell, its distance from the first cell in steps; -1 if the cell is not reached.
    - ``parent``: for every reached cell except the first, the cell before it on the path.
    """
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

    For every maze, the length of its path is drawn first, uniformly from ``shortest`` to ``longest``. Then
    mazes are carved, and random starts are tried, until some cells are at this distance from the start. One
    of these cells, chosen at random, is the goal.

    Returns:
        Questions (P, C) and answers (P, C), both uint8, and lengths (P,) int64. If no path of a drawn length
        is found, the function stops at this maze. The maze is then the last in the arrays. Its length is
        negative, and its boards are unfinished.
    """
    cells = n * n
    questions = np.empty((count, cells), np.uint8)
    answers = np.empty((count, cells), np.uint8)
    lengths = np.empty(count, np.int64)
    state = np.zeros(1, np.uint64)
    queue, distance, parent = np.empty((3, cells), np.int64)
    opened = 2 * ((n - 1) // 2) ** 2 - 1  # number of free cells: rooms and doors
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
