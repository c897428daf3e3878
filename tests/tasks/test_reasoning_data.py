"""Tests of Sudokus and mazes: puzzles checked by independent solvers, symmetries, files and errors."""

import gzip
import sys
from collections import Counter
from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deqseq.tasks.reasoning import collect, mazes, sudoku
from deqseq.tasks.reasoning.__main__ import main
from deqseq.tasks.reasoning.files import read_arrays, read_csv, write_csv
from deqseq.tasks.reasoning.puzzles import FREE, GOAL, PATH, START, WALL, Puzzles, Task
from deqseq.tasks.reasoning.symmetries import Symmetries, numbered_symmetry, random_symmetries
from deqseq.tasks.reasoning.verify import solve_sudoku, verify

pytest.importorskip("numba", reason="numba is not installed: pip install 'deqseq[reason]'")

# A hard Sudoku by Arto Inkala (2012): the clues, and the solution.
HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
HARD_SOLVED = "812753649943682175675491283154237896369845721287169534521974368438526917796318452"

# The first puzzles of seed 0: the question of a Sudoku rated at least 3, and the answer to a maze of size 7.
GOLDEN_SUDOKU = ".....3..77...5....3.67....581....6....35....8.......12..86......45.291.........2."
GOLDEN_MAZE = "1111111121245112111511235551111112112222211111111"

HEADER = "source,question,answer,rating"
GOOD = "x,1...............,1234341221434321,0"

MAZE = """\
#####
#S#G#
# # #
#   #
#####"""
MAZE_SOLVED = "######S#G##o#o##ooo######"

Make = Callable[..., Puzzles]


def digits(text: str) -> list[int]:
    return [0 if character == "." else int(character) for character in text]


def equal(one: Puzzles, other: Puzzles) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def sudokus() -> Puzzles:
    return sudoku.generate(12, rating=4, seed=3)


@pytest.fixture(scope="module")
def small_mazes() -> Puzzles:
    return mazes.generate(300, size=9, seed=3)


class TestGenerating:
    def test_sudokus_are_minimal_with_one_solution_and_rated_as_defined(self, sudokus: Puzzles) -> None:
        verify("sudoku", sudokus)
        assert sudokus.questions.shape == sudokus.answers.shape == (12, 81)
        assert sudokus.questions.dtype == sudokus.answers.dtype == torch.uint8
        assert int(sudokus.ratings.min()) >= 4

    def test_small_sudokus(self) -> None:
        found = sudoku.generate(100, size=4, seed=1)
        verify("sudoku", found)
        assert len(found.questions.unique(dim=0)) == 100
        assert found.questions.shape == (100, 16) and int((found.questions > 0).sum(1).min()) >= 4

    def test_a_rating_selects_from_the_same_puzzles(self) -> None:
        every = sudoku.generate(200, seed=5)
        hard = every.ratings >= 3
        chosen = sudoku.generate(int(hard.sum()), rating=3, seed=5)
        assert equal(chosen, Puzzles(*(column[hard] for column in every)))

    @pytest.mark.parametrize("size", [5, 8, 9, 12, 30])
    def test_mazes_are_perfect_and_marked(self, size: int) -> None:
        found = mazes.generate(60, size=size, seed=1)
        verify("maze", found)
        shortest, longest = mazes.default_lengths(size)
        assert found.questions.shape == (60, size * size)
        assert shortest <= int(found.ratings.min()) <= int(found.ratings.max()) <= longest
        assert len(found.questions.unique(dim=0)) == 60

    def test_lengths_are_uniform(self) -> None:
        found = mazes.generate(4100, seed=2)
        counts = Counter(found.ratings.tolist())
        assert set(counts) == set(range(100, 141))
        excess = sum((count - 100) ** 2 / 100 for count in counts.values())
        assert excess < 76  # chi-squared with 40 degrees of freedom exceeds 76 with probability 5e-4

    def test_starts_and_goals_are_rooms_and_doors(self) -> None:
        found = mazes.generate(500, size=9, seed=2)
        for token in (START, GOAL):
            cells = (found.questions == token).int().argmax(1)
            assert len(cells.unique()) > 30  # 40 cells are possible: 16 rooms, 24 doors

    @pytest.mark.parametrize(
        "make",
        [
            lambda **options: sudoku.generate(100, seed=7, **options),
            lambda **options: sudoku.generate(100, size=4, rating=0, seed=7, **options),
            lambda **options: mazes.generate(150, size=11, seed=7, **options),
        ],
    )
    def test_workers_do_not_change_puzzles(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(collect.os, "cpu_count", lambda: 5)
        files = []
        for workers in (1, 2, 5):
            found = make(workers=workers)
            files.append(tmp_path / f"{workers}.csv")
            write_csv(files[-1], "maze" if found.questions.shape[1] == 121 else "sudoku", found)
        assert len({file.read_bytes() for file in files}) == 1

    @pytest.mark.parametrize("make", [sudoku.generate, mazes.generate])
    def test_counts_extend_and_seeds_differ(self, make: Make) -> None:
        few, more, others = make(20, seed=1), make(90, seed=1), make(90, seed=2)
        assert equal(few, Puzzles(*(column[:20] for column in more)))
        assert not set(map(bytes, more.questions.numpy())) & set(map(bytes, others.questions.numpy()))

    def test_golden_puzzles(self) -> None:
        """A seed gives the same puzzles in all versions of the library."""
        found = sudoku.generate(1, rating=3, seed=0)
        maze = mazes.generate(1, size=7, seed=0)
        assert found.questions[0].tolist() == digits(GOLDEN_SUDOKU)
        assert "".join(map(str, maze.answers[0].tolist())) == GOLDEN_MAZE

    def test_there_are_at_most_as_many_workers_as_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        pool = collect.ThreadPoolExecutor
        monkeypatch.setattr(collect, "ThreadPoolExecutor", lambda n: asked.append(n) or pool(n))
        monkeypatch.setattr(collect.os, "cpu_count", lambda: 3)
        for workers in (None, 2, 99_999):
            sudoku.generate(1, size=4, seed=0, workers=workers)
        assert asked == [3, 2, 3]

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: sudoku.generate(1, size=6, seed=0), "size must be 4 or 9, got 6"),
            (lambda: sudoku.generate(1, rating=-1, seed=0), "rating must be a whole number >= 0, got -1"),
            (lambda: sudoku.generate(0, seed=0), "count must be a whole number >= 1, got 0"),
            (lambda: sudoku.generate(1, seed=2**32), r"seed must be a whole number in \[0, 2\*\*32\)"),
            (lambda: sudoku.generate(1, seed=0, workers=-1), "workers must be a whole number >= 1, got -1"),
            (lambda: sudoku.generate(1, seed=0, workers=0), "workers must be a whole number >= 1, got 0"),
            (lambda: sudoku.generate(1, size=4, rating=9, seed=0), r"found 0 of 1 .* the rating \(now 9\)"),
            (lambda: mazes.generate(1, size=4, seed=0), r"size must be a whole number in \[5, 1000\], got 4"),
            (lambda: mazes.generate(1, size=100_000, seed=0), r"\[5, 1000\], got 100000"),
            (lambda: mazes.generate(1, size=9, lengths=(5, 4), seed=0), r"\[1, 30\], the shorter first"),
            (lambda: mazes.generate(1, size=9, lengths=(1, 31), seed=0), r"got \(1, 31\)"),
            (lambda: mazes.generate(1, lengths=(390, 390), seed=0), "have no path of 390 steps"),
            (lambda: mazes.generate(9**4, size=5, lengths=(6, 6), seed=0), "or allow more lengths than 6 to"),
        ],
    )
    def test_refusals(self, make: Make, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collect, "_PATIENCE", 3)
        with pytest.raises(ValueError, match=said):
            make()

    @pytest.mark.parametrize("make", [sudoku.generate, mazes.generate])
    def test_without_numba(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("sudoku_search", "maze_carving", "random_numbers"):
            monkeypatch.delitem(sys.modules, f"deqseq.tasks.reasoning.{name}", raising=False)
        monkeypatch.setitem(sys.modules, "numba", None)
        with pytest.raises(ValueError, match=r"needs numba: pip install 'deqseq\[reason\]'"):
            make(1, seed=0)


class TestSolver:
    def test_a_hard_puzzle(self) -> None:
        solved = solve_sudoku(digits(HARD))
        assert solved.solutions == [digits(HARD_SOLVED)] and solved.dead_ends > 10

    @pytest.mark.parametrize("limit", [1, 3, 288, 1000])
    def test_all_solutions(self, limit: int) -> None:
        """An empty board of size 4 has 288 solutions. The solver finds all, or ``limit`` of them."""
        found = solve_sudoku([0] * 16, limit).solutions
        assert len({*map(tuple, found)}) == len(found) == min(limit, 288)

    def test_contradictions(self) -> None:
        assert solve_sudoku([1, 1, *[0] * 14]) == ([], 1)
        assert solve_sudoku([1, 2, 3, 0, 0, 0, 0, 4, *[0] * 8]) == ([], 1)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("clue removed", "puzzle 2: its answer must be its only solution"),
            ("clue added", "puzzle 2: (is not minimal: row|its rating must be)"),
            ("rating", "puzzle 2: its rating must be .*, got 99"),
            ("digits of the answer", "puzzle 2: the answer must have every digit"),
            ("answer", "puzzle 2: the answer must keep the clues"),
        ],
    )
    def test_verify_refuses_sudokus(self, change: str, said: str, sudokus: Puzzles) -> None:
        wrong = Puzzles(*(column[:3].clone() for column in sudokus))
        question, answer = wrong.questions[1], wrong.answers[1]
        clues, blanks = question.nonzero()[0], (question == 0).nonzero()[0]
        match change:
            case "clue removed":
                question[clues] = 0
            case "clue added":
                question[blanks] = answer[blanks]
            case "rating":
                wrong.ratings[1] = 99
            case "digits of the answer":
                answer[blanks] = answer[blanks] % 9 + 1
            case "answer":
                answer[:] = answer % 9 + 1
        with pytest.raises(ValueError, match=said):
            verify("sudoku", wrong)

    def test_minimality_and_rating_can_be_left_out(self, sudokus: Puzzles) -> None:
        more = Puzzles(*(column[:3].clone() for column in sudokus))
        blanks = (more.questions == 0).int().argmax(1, keepdim=True)
        more.questions.scatter_(1, blanks, more.answers.gather(1, blanks))
        verify("sudoku", more, minimal=False, rated=False)
        with pytest.raises(ValueError, match="puzzle 1: is not minimal"):
            verify("sudoku", more, rated=False)

    @pytest.mark.parametrize(
        ("cells", "said"),
        [
            ({7: FREE}, "is not perfect"),  # a second way from S to G
            ({11: WALL}, "is not perfect"),  # no way from S to G
            ({8: START}, "the question must have one start"),
            ({6: FREE}, "the question must have one start"),
            ({8: FREE}, "the question must have one goal"),
            ({16: WALL, 11: WALL}, "every cell at an odd row and column must be free"),
            ({2: FREE}, "its border must be walls"),
            ({17: PATH}, "walls, free cells, S and G only"),
        ],
    )
    def test_verify_refuses_mazes(self, cells: dict[int, int], said: str) -> None:
        question, answer = self.maze()
        for cell, token in cells.items():
            question[cell] = token
        answer = torch.where(question == FREE, torch.where(answer == PATH, PATH, FREE), question)
        with pytest.raises(ValueError, match=said):
            verify("maze", Puzzles(question[None], answer[None].to(torch.uint8), torch.tensor([6])))

    def test_verify_refuses_paths(self) -> None:
        question, answer = self.maze()
        good = Puzzles(question[None], answer[None], torch.tensor([6]))
        verify("maze", good)
        with pytest.raises(ValueError, match="its rating must be 6, the steps of its path, got 7"):
            verify("maze", good._replace(ratings=torch.tensor([7])))
        short = answer.clone()
        short[17] = FREE
        with pytest.raises(ValueError, match="must mark the path from start to goal"):
            verify("maze", good._replace(answers=short[None]))
        with pytest.raises(ValueError, match="question with a path marked"):
            verify("maze", good._replace(answers=torch.full_like(good.answers, PATH)))

    def maze(self) -> tuple[torch.Tensor, torch.Tensor]:
        table = {"#": WALL, " ": FREE, "S": START, "G": GOAL, "o": PATH}
        texts = (MAZE.replace("\n", ""), MAZE_SOLVED)
        question, answer = (torch.tensor([table[c] for c in text], dtype=torch.uint8) for text in texts)
        return question, answer


class TestSymmetries:
    @staticmethod
    def draw(size: int, count: int, seed: int = 0, task: Task = "sudoku") -> Symmetries:
        return random_symmetries(task, size, count, torch.Generator("cpu").manual_seed(seed))

    def test_sudokus_stay_minimal_with_one_solution(self, sudokus: Puzzles) -> None:
        found = self.draw(9, len(sudokus.ratings), seed=1)
        questions, answers = (found.apply(boards.long()) for boards in sudokus[:2])
        assert questions.dtype == answers.dtype == torch.int64
        assert not (questions == sudokus.questions).all(1).any()
        assert torch.equal((questions > 0).sum(1), (sudokus.questions > 0).sum(1))
        changed = Puzzles(questions.to(torch.uint8), answers.to(torch.uint8), sudokus.ratings)
        verify("sudoku", changed, rated=False)

    def test_mazes_keep_their_paths(self, small_mazes: Puzzles) -> None:
        size, count = isqrt(small_mazes.questions.shape[1]), len(small_mazes.ratings)
        found = self.draw(size, count, task="maze")
        questions, answers = (found.apply(boards.long()).byte() for boards in small_mazes[:2])
        assert not torch.equal(questions, small_mazes.questions)
        verify("maze", Puzzles(questions, answers, small_mazes.ratings))

    @pytest.mark.parametrize(("task", "size"), [("sudoku", 4), ("sudoku", 9), ("maze", 7)])
    def test_the_inverse_changes_boards_back(self, task: Task, size: int) -> None:
        boards = torch.randint(0, size + 1 if task == "sudoku" else 6, (20, size * size))
        for count in (20, 1):  # a symmetry for each board, one for all
            found = self.draw(size, count, task=task)
            assert not torch.equal(found.apply(boards), boards)
            assert torch.equal(found.inverse().apply(found.apply(boards)), boards)
            assert torch.equal(found.apply(found.inverse().apply(boards)), boards)

    def test_numbered_symmetries_begin_with_none_and_differ(self) -> None:
        """The eight of a maze are all different, and then they repeat."""
        for task, size, count in (("sudoku", 9, 32), ("maze", 7, 8)):
            found = [numbered_symmetry(task, size, number) for number in range(count)]
            boards = torch.randint(1, 6, (3, size * size))
            assert torch.equal(found[0].apply(boards), boards)
            assert len({tuple(f.cells[0].tolist() + f.tokens[0].tolist()) for f in found}) == count
        assert torch.equal(numbered_symmetry("maze", 7, 9).cells, found[1].cells)

    def test_the_seed_decides(self, sudokus: Puzzles) -> None:
        boards = sudokus.questions.long()
        one, same, other = (self.draw(9, len(boards), seed).apply(boards) for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)

    def test_all_symmetries_of_a_small_sudoku_are_drawn(self) -> None:
        """Every board that a symmetry can make is drawn, with about equal frequency.

        A board of size 4 has 24 · 8 · 8 · 2 symmetries. Here only row 0 has clues, so many symmetries give
        equal boards. 24 · 4 · 2 boards are different.
        """
        questions = torch.zeros(4000, 16, dtype=torch.int64)
        questions[:, :4] = torch.tensor([1, 2, 3, 4])
        images, counts = self.draw(4, 4000).apply(questions).unique(dim=0, return_counts=True)
        assert len(images) == 24 * 4 * 2  # orders of the digits, lines for the clues, row or column
        assert counts.min() > 5 and counts.max() < 50  # 21 on average

    @pytest.mark.parametrize("size", [4, 9])
    def test_cells_and_digits_are_uniform(self, size: int) -> None:
        count = 20_000
        questions = torch.zeros(count, size * size, dtype=torch.int64)
        questions[:, 0] = 1
        found = self.draw(size, count).apply(questions)
        cells = found.argmax(1).bincount(minlength=size * size)
        kinds = found.amax(1).bincount(minlength=size + 1)[1:]
        for counts in (cells, kinds):
            mean = count / len(counts)
            assert ((counts - mean).abs() < 5 * mean**0.5).all()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("sudoku", 5, 2), "16 or 81 cells, got 25"),
            (("sudoku", 4.0, 2), "size must be a whole number"),
            (("sudoku", 9, 0), "count must be a whole number >= 1, got 0"),
            (("chess", 8, 1), "task must be one of sudoku, maze, got 'chess'"),
        ],
    )
    def test_refusals(self, arguments: tuple[Any, int, int], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            random_symmetries(*arguments, torch.Generator("cpu"))

    def test_boards_are_checked(self, sudokus: Puzzles) -> None:
        found = self.draw(9, 2)
        with pytest.raises(ValueError, match=r"must be int64, got torch\.uint8"):
            found.apply(sudokus.questions[:2])
        for shape in ((3, 81), (2, 16), (81,)):
            with pytest.raises(ValueError, match=r"shape \(2, 81\), got"):
                found.apply(torch.zeros(shape, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"shape \(B, 81\), got"):
            self.draw(9, 1).apply(torch.zeros(2, 16, dtype=torch.int64))


class TestFiles:
    @pytest.mark.parametrize("name", ["puzzles.csv", "puzzles.csv.gz"])
    @pytest.mark.parametrize("task", ["sudoku", "maze"])
    def test_round_trip(
        self, name: str, task: Task, sudokus: Puzzles, small_mazes: Puzzles, tmp_path: Path
    ) -> None:
        puzzles = sudokus if task == "sudoku" else small_mazes
        path = tmp_path / name
        write_csv(path, task, puzzles)
        first = path.read_bytes()
        assert equal(read_csv(path, task), puzzles)
        write_csv(path, task, puzzles)
        assert path.read_bytes() == first and [*tmp_path.iterdir()] == [path]

    def test_the_published_format(self, tmp_path: Path) -> None:
        path = tmp_path / "test.csv.gz"
        path.write_bytes(gzip.compress(f"{HEADER}\r\ninkala,{HARD},{HARD_SOLVED},42\r\n".encode()))
        found = read_csv(path, "sudoku")
        assert found.questions.tolist() == [digits(HARD)] and found.ratings.tolist() == [42]
        write_csv(tmp_path / "out.csv", "sudoku", found, source="inkala")
        assert (tmp_path / "out.csv").read_text() == f"{HEADER}\ninkala,{HARD},{HARD_SOLVED},42\n"

    def test_a_byte_order_mark_and_quotes_are_allowed(self, tmp_path: Path) -> None:
        path = tmp_path / "quoted.csv"
        quoted = (HEADER + "\n" + GOOD).replace(",", '","').replace("\n", '"\n"')
        path.write_text(f'"{quoted}"\n', encoding="utf-8-sig")
        assert len(read_csv(path, "sudoku").ratings) == 1

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (GOOD[:-2], "line 3: must have 4 fields, got 3"),
            (GOOD[:-1] + "-1", "line 3: the rating must be a whole number >= 0, got '-1'"),
            (GOOD[:-1] + "1.5", "line 3: the rating must be a whole number >= 0, got '1.5'"),
            (GOOD.replace("x,1", "x,"), "line 3: question and answer must have 16 cells, got 15 and 16"),
            (GOOD.replace("x,1", "x,5"), "line 3: the question must have digits up to 4 and dots"),
            (
                GOOD.replace("x,1.", "x,1a"),
                "line 3: boards must have the characters '.123456789' only, got 'a'",
            ),
            (GOOD.replace("x,1.", "x,1é"), "line 3: question and answer must have 16 cells, got 17 and 16"),
            (GOOD.replace("x,1", "x,2"), "line 3: the answer must keep the clues"),
            (GOOD.replace("1234", "1243"), "line 3: the answer must have every digit in every row, column"),
            ('x,"' + GOOD[2:], "line 3: unexpected end of data"),
            ("", "line 3: must have 4 fields, got 0"),
        ],
    )
    def test_bad_lines(self, line: str, said: str, tmp_path: Path) -> None:
        path = written(tmp_path / "bad.csv", GOOD, line, GOOD)
        with pytest.raises(ValueError) as error:
            read_csv(path, "sudoku")
        assert str(error.value).startswith(f"{path}, ") and said in str(error.value)

    def test_bad_files(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.csv"
        for content, said in {
            "": "line 1: the header must be source,question,answer,rating, got None",
            "question,answer\n": "line 1: the header must be",
            f"{HEADER}\n": "line 2: missing, the file must hold at least one puzzle",
            f"{HEADER}\nx,{'.' * 25},{'1' * 25},0\n": "line 2: a Sudoku must have 16 or 81 cells, got 25",
        }.items():
            path.write_text(content)
            with pytest.raises(ValueError, match=said):
                read_csv(path, "sudoku")
        whole = gzip.compress(f"{HEADER}\n{GOOD}\n".encode() * 99)
        for damaged in (whole[:-9], b"text", whole[:20] + bytes(9) + whole[29:]):
            (tmp_path / "bad.csv.gz").write_bytes(damaged)
            with pytest.raises(ValueError, match=r"bad\.csv\.gz, line"):
                read_csv(tmp_path / "bad.csv.gz", "sudoku")
        with pytest.raises(ValueError, match="task must be one of sudoku, maze, got 'chess'"):
            read_csv(path, "chess")  # type: ignore[arg-type]

    def test_mazes_of_the_wrong_task(self, small_mazes: Puzzles, tmp_path: Path) -> None:
        write_csv(tmp_path / "mazes.csv", "maze", small_mazes)
        with pytest.raises(ValueError, match=r"line 2: boards must have the characters '\.123456789' only"):
            read_csv(tmp_path / "mazes.csv", "sudoku")

    def test_arrays(self, small_mazes: Puzzles, tmp_path: Path) -> None:
        def save(inputs: np.ndarray, labels: np.ndarray) -> None:
            np.save(tmp_path / "all__inputs.npy", inputs)
            np.save(tmp_path / "all__labels.npy", labels)

        questions, answers = small_mazes.questions.numpy(), small_mazes.answers.numpy()
        save(questions, answers)
        found = read_arrays(tmp_path)
        assert equal(found, small_mazes)
        verify("maze", found)
        for inputs, labels, said in (
            (questions, answers[:9], "must have the same shape"),
            (questions, questions + 9, "must have tokens 0 to 5"),
            (questions * 1.0, answers, "must be whole numbers"),
            (questions, np.roll(answers, 1, 0), "maze 1: the answer must be the question with a path marked"),
        ):
            save(inputs, labels)
            with pytest.raises(ValueError, match=said):
                read_arrays(tmp_path)

        np.savez(tmp_path / "archive.npz", questions)
        for content in (b"", b"text", b"PK\x03\x04", (tmp_path / "archive.npz").read_bytes()):
            (tmp_path / "all__inputs.npy").write_bytes(content)
            with pytest.raises(ValueError, match=r"all__inputs\.npy cannot be read"):
                read_arrays(tmp_path)


class TestCommand:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["sudoku", "--size", "9", "--count", "5", "--rating", "2", "--seed", "1"],
            ["sudoku", "--size", "4", "--count", "5", "--workers", "1"],
            ["maze", "--size", "9", "--count", "5", "--lengths", "7", "12"],
        ],
    )
    def test_data(self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "new" / "puzzles.csv.gz"
        assert main(["data", *arguments, "--output", str(path)]) == 0
        assert "wrote 5 " in capsys.readouterr().out
        assert main(["data", arguments[0], "--check", str(path)]) == 0
        assert "all are right" in capsys.readouterr().out
        assert main(["data", *arguments, "--output", str(path)]) == 2
        assert "exists: choose another name" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ("sudoku", "give either --output or --check"),
            ("sudoku --output a.csv --check b.csv", "give either --output or --check"),
            ("sudoku --output a.csv --lengths 1 2", "--lengths is for mazes"),
            ("maze --output a.csv --rating 1", "--rating is for Sudokus"),
            ("maze --output a.csv --lengths 1", "--lengths must be two numbers, got 1"),
            ("sudoku --output a.csv --size 5", "size must be 4 or 9, got 5"),
            ("chess --output a.csv", "task"),
            ("sudoku --check nothing.csv", "nothing.csv does not exist"),
            ("sudoku --check a.csv --size 9 --tests b.csv", "leave out --tests, --size"),
            ("maze --check a.csv --count 5 --seed 0 --workers 1", "leave out --count, --seed, --workers"),
            ("sudoku --output a.csv --test-count 5", "--test-count 5 needs --tests"),
            ("maze --output a.csv --tests b/../a.csv", "must be two files, got b/../a.csv and a.csv"),
        ],
    )
    def test_refusals(
        self, arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        assert main(["data", *arguments.split()]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and not [*tmp_path.iterdir()]

    def test_a_wrong_file_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = written(tmp_path / "wrong.csv", f"x,{HARD},{HARD_SOLVED},1")
        assert main(["data", "sudoku", "--check", str(path)]) == 2
        assert "puzzle 1: its rating must be" in capsys.readouterr().err


def test_training_and_test_files_share_no_puzzle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training puzzles and the test puzzles are the puzzles of one larger file, divided in two."""
    files = [tmp_path / name for name in ("train.csv", "tests.csv", "all.csv")]
    made = ["data", "sudoku", "--size", "4", "--seed", "1"]
    split = ["--output", str(files[0]), "--count", "20", "--tests", str(files[1]), "--test_count", "5"]
    assert main([*made, *split]) == 0
    assert main([*made, "--output", str(files[2]), "--count", "25"]) == 0
    first, second, whole = (file.read_text().splitlines() for file in files)
    assert first + second[1:] == whole and len(second) == 6
    assert main([*made, "--output", str(tmp_path / "x.csv"), "--tests", str(tmp_path / "x.csv")]) == 2
    assert "two files" in capsys.readouterr().err
