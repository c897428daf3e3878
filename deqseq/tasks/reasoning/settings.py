"""Settings of a run on puzzles."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deqseq.tasks.common.settings import (
    BelowOne,
    ClosedUnitInterval,
    NonNegativeFinite,
    NonNegativeInt,
    PositiveFinite,
    PositiveInt,
    Seed,
    check_types,
)
from deqseq.tasks.reasoning.puzzles import Task, size_of

if TYPE_CHECKING:  # transformers, which takes seconds to import
    from deqseq.tasks.reasoning.model import BoardModel

RUNS = Path(__file__).parent / "runs"


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """All settings of a run; saved in the folder of the run as ``settings.json``.

    Every training step does a few iterations for each puzzle of its batch. The next step with this batch
    continues from the iterates at which this step ends. A puzzle leaves the batch when it has been solved in
    ``solved_steps`` steps in a row, or after ``budget`` steps. Steps with other batches do not count.

    Args:
        data: CSV file of the training puzzles; written by the command 'data'
        test: CSV file of the puzzles on which accuracy is logged during training; by default the last tenth
            of the training puzzles, which training then leaves out
        task: sudoku or maze
        size: cells along a side of a board
        explicit: train the explicit twin, which applies the map once
        backbone: the map, as a mapping {name: NAME, option: value}. It must not be causal
        embed_std: standard deviation of the initial embeddings of the cells' tokens. With a larger one, the
            question weighs more against the iterates at the start of training
        solver: solver, or a list of two solvers: one for training and one for evaluation
        gradient: gradient strategy. Unrolled with 1 iteration does one iteration in every training step
        guess: initial iterate of a search: zero, noise, or any installed guess but previous. A list of two
            gives one for training and one for evaluation, also for the tests during training
        tolerance: relative residual of a board at which its search ends
        max_iter: in evaluation, maximum number of evaluations of the map in one search
        starts: in the commands evaluate and solve, maximum number of searches for a puzzle, each from another
            start. The next search follows if a search does not meet the tolerance. If ``augment`` is true,
            every search but the first solves a symmetric copy of the puzzle, unless --symmetries is false
        train_max_iter: in training, maximum number of evaluations of the map in one search. Only for gradient
            strategies that search
        budget: maximum number of steps for which a puzzle stays in the batch
        solved_steps: a puzzle leaves the batch when it has been solved in this many steps in a row. With 1,
            the model need not learn to stay at an answer
        batches: number of batches that take turns. With few, the same puzzles return soon. The model can
            then fit these puzzles, and solve fewer fresh ones
        damage: probability that a step damages the iterates of a puzzle: some of its cells return to the
            initial guess, and the other cells continue
        hints: largest probability that a puzzle shows a cell of its answer, at the first step; 0 means no
            hints. Each puzzle draws its own probability between 0 and a bound, which falls linearly from
            ``hints`` to 0. A puzzle keeps its hints until it leaves the batch
        hint_share: share of the steps in which the bound of the hints falls to 0; above 0 if there are hints
        loss: softmax, or stablemax, which replaces exp by a function that grows linearly
        augment: apply a random symmetry to every training puzzle. A maze is rotated or reflected. In a
            Sudoku, digits, rows and columns are permuted, and the board may be transposed
        steps: optimiser steps
        batch_size: puzzles per optimiser step
        learning_rate: highest learning rate, reached after a warm-up over 5 % of the steps. It decays over
            the last 30 % of the steps
        weight_decay: weight decay of matrices
        max_grad_norm: gradients are clipped to this norm; 0 means no clipping
        average: decay of the moving average of the weights; the trained model has averaged weights
        keep: weights of the trained model. last: the averaged weights of the last step. best: those of the
            step whose test had the highest accuracy. A test then ends early if its weights can no longer be
            the best, or if they solve nothing in the first batch. The test puzzles choose the weights, so
            measure the accuracy on other puzzles
        eval_steps: steps between two tests during training; 0 means no tests
        eval_depth: number of evaluations of the map in a test during training
        eval_puzzles: maximum number of puzzles in a test during training. Raw weights, which are not
            averaged, are tested on the first 512 of them
        bf16: autocast to bfloat16; weights stay float32, and evaluation on a CPU uses float32
        compile: compile the map with torch.compile; on GPUs only
        seed: seed of weights and data

    Raises:
        ValueError: a value is out of range; the message states the rule.
    """

    data: str
    test: str | None = None
    task: Task = "sudoku"
    size: PositiveInt = 9
    explicit: bool = False
    backbone: dict[str, Any]
    embed_std: PositiveFinite = 1.0
    solver: Any = "picard"
    gradient: str | dict[str, Any]
    guess: str | dict[str, Any] | list[Any] = "noise"
    tolerance: PositiveFinite = 1e-3
    max_iter: PositiveInt = 256
    starts: PositiveInt = 1
    train_max_iter: PositiveInt = 16
    budget: PositiveInt = 32
    solved_steps: PositiveInt = 1
    batches: PositiveInt = 16
    damage: ClosedUnitInterval = 0.0
    hints: ClosedUnitInterval = 0.0
    hint_share: ClosedUnitInterval = 0.15
    loss: Literal["stablemax", "softmax"] = "stablemax"
    augment: bool = True
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFinite
    weight_decay: NonNegativeFinite = 1.0
    max_grad_norm: NonNegativeFinite = 1.0
    average: BelowOne = 0.999
    keep: Literal["last", "best"] = "last"
    eval_steps: NonNegativeInt = 500
    eval_depth: PositiveInt = 64
    eval_puzzles: PositiveInt = 512
    bf16: bool = False
    compile: bool = False
    seed: Seed = 1

    def __post_init__(self) -> None:
        check_types(self)
        size_of(self.task, self.size**2)
        if self.solved_steps > self.budget:
            raise ValueError(
                f"solved_steps must be at most budget = {self.budget}, got {self.solved_steps}: a puzzle "
                "leaves when its budget is spent"
            )
        if self.hints and not self.hint_share:
            raise ValueError(
                f"hints = {self.hints} needs hint_share above 0, got 0: no step would have hints"
            )
        if self.keep == "best" and self.eval_steps == 0:
            raise ValueError("keep: best needs eval_steps >= 1, got 0")
        with torch.device("meta"):  # checks the parts and sizes
            layer: Any = self.model().layer
        varies = self.augment or layer.eval_solve.guess.varies
        if self.starts > 1 and not self.explicit and not varies:
            raise ValueError(
                f"starts = {self.starts} without augment needs a guess that varies, such as noise, got "
                f"{self.guess}: all starts would be equal. Give starts = 1, or another guess"
            )
        if self.explicit:  # checks the parts that only an implicit model uses
            replace(self, explicit=False, starts=1)

    def model(self) -> "BoardModel":
        """A new model with random weights."""
        from deqseq.tasks.reasoning.model import BoardConfig, BoardModel

        policies = [
            {"name": "residual", "rtol": self.tolerance, "max_iter": most, "scope": "sequence"}
            for most in (self.train_max_iter, self.max_iter)
        ]
        return BoardModel(BoardConfig(
            task=self.task, size=self.size, implicit=not self.explicit, backbone=self.backbone,
            solver=self.solver, gradient=self.gradient, convergence=policies, guess=self.guess,
            embed_std=self.embed_std, bf16=self.bf16,
        ))  # fmt: skip
