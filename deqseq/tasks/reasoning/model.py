"""A model that solves boards: embeddings of the cells, an implicit or explicit layer, and an output layer.

Shapes: B boards, C cells of a board, V tokens in the vocabulary, D width of z.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from deqseq import kernels
from deqseq.backbones import LlamaBackbone, MixerBackbone, RecursionBackbone
from deqseq.gradients import ImplicitDifferentiation
from deqseq.guesses import Previous
from deqseq.layer import ExplicitSequenceLayer, ImplicitSequenceLayer
from deqseq.problem import SolveOptions
from deqseq.solution import Solution
from deqseq.tasks.reasoning.puzzles import CHARACTERS, Task, check_task, size_of


class BoardConfig(PretrainedConfig):
    """The configuration of a :class:`BoardModel`.

    Backbone, solver, gradient, convergence and guess are names or mappings, as for
    :class:`~deqseq.ImplicitSequenceLayer`. ``solver``, ``convergence`` and ``guess`` may also be pairs: the
    first for training, the second for evaluation.

    Attributes:
        task: ``"sudoku"`` or ``"maze"``.
        size: cells along a side of a board.
        implicit: true: an implicit layer; false: an explicit layer, which applies the map once.
        backbone: the map. It must not be causal.
        solver, gradient, convergence, guess: parts of the implicit layer.
        embed_std: standard deviation of the initial embeddings.
        bf16: evaluate under autocast to bfloat16 on GPUs.
    """

    model_type = "board"

    task: str = "sudoku"
    size: int = 9
    implicit: bool = True
    backbone: Any = None
    solver: Any = "picard"
    gradient: Any = "phantom"
    convergence: Any = None
    guess: Any = "zero"
    embed_std: float = 1.0
    bf16: bool = False


@dataclass
class BoardOutput(ModelOutput):
    """The output of a :class:`BoardModel`.

    Attributes:
        logits: (B, C, V).
        z: (B, C, D) the output of the layer. For an implicit model, these are the last iterates.
        solution: how every cell was solved; ``None`` for an explicit model.
    """

    logits: Tensor | None = None
    z: Tensor | None = None
    solution: Solution | None = None


class BoardModel(PreTrainedModel):
    """Predicts the token of each cell of the answer from all cells of the question.

    With a :class:`~deqseq.backbones.RecursionBackbone`, the output layer reads only the latent z_H. The
    embedded question enters only the updates of z_L. Both are as in TRM (arXiv 2510.04871).

    Attributes:
        symmetries: if true, every start but the first solves a symmetric copy of a puzzle, and its answer is
            changed back. For models that were trained on such copies.

    Raises:
        ValueError: the task, the size or a part is unknown, or a part does not fit such boards.
    """

    config_class = BoardConfig
    config: BoardConfig
    main_input_name = "input_ids"

    def __init__(self, config: BoardConfig) -> None:
        super().__init__(config)
        self.symmetries = False
        check_task(config.task)
        size_of(self.task, config.size**2)
        self.layer: ImplicitSequenceLayer | ExplicitSequenceLayer
        if config.implicit:
            pairs = {name: _pair(getattr(config, name)) for name in ("solver", "convergence", "guess")}
            self.layer = ImplicitSequenceLayer(config.backbone, gradient=config.gradient, **pairs)
            check_guess(self.layer)
        else:
            self.layer = ExplicitSequenceLayer(explicit(config.backbone))
        backbone = self.layer.backbone
        if backbone.causal or backbone.d_model is None:
            raise ValueError(
                f"boards need a backbone that has a width and is not causal, got {config.backbone}"
            )
        inner: Any = getattr(backbone, "map", backbone)
        if isinstance(inner, LlamaBackbone) and inner.board not in (None, config.size):
            raise ValueError(f"the backbone's board must be size = {config.size}, got {inner.board}")
        if isinstance(inner, MixerBackbone) and inner.tokens != config.size**2:
            raise ValueError(
                f"the backbone's tokens must be {config.size**2}, the cells of a board of size "
                f"{config.size}, got {inner.tokens}"
            )
        self.d_read = int(inner.d_model)  # width of the latent that the output layer reads
        vocabulary = config.size + 1 if config.task == "sudoku" else len(CHARACTERS["maze"])
        self.embed = nn.Embedding(vocabulary, self.d_read)
        self.head = nn.Linear(self.d_read, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=config.embed_std)
        nn.init.trunc_normal_(self.head.weight, std=1 / math.sqrt(self.d_read))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, so that transformers keeps the initial weights of the parts."""

    @property
    def task(self) -> Task:
        return self.config.task  # type: ignore[return-value]

    def compile_map(self, device: torch.device, graphs: bool = False) -> None:
        """Compile the layer's map with :func:`torch.compile`, unless ``device`` is the CPU.

        The first evaluations with a batch size then take half a minute longer, and later ones are faster.

        Args:
            graphs: replay compiled rounds of a :class:`~deqseq.backbones.RecursionBackbone` as CUDA graphs.
                For training, where the batch size is constant: every batch size needs a graph of its own.
                Other backbones are compiled without graphs.
        """
        if device.type != "cpu":
            # The map is compiled again for other batch sizes, and in evaluation. After more compilations than
            # the limit, PyTorch runs it uncompiled.
            torch._dynamo.config.recompile_limit = 64
            # Implicit differentiation goes backward several times through one evaluation. Compiled code then
            # must not reuse the memory of saved tensors.
            if isinstance(getattr(self.layer, "gradient", None), ImplicitDifferentiation):
                torch._functorch.config.donated_buffer = False
            backbone = self.layer.backbone
            graphs = graphs and isinstance(backbone, RecursionBackbone)
            backbone.compile(mode="reduce-overhead" if graphs else None)

    def precision(self) -> AbstractContextManager[Any]:
        """A context manager for the precision of evaluation: bfloat16 on GPUs if ``config.bf16``."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.config.bf16 and self.device.type == "cuda")

    def inputs(self, input_ids: Tensor) -> Tensor:
        """The layer's input x (B, C, D) for the boards ``input_ids`` (B, C) int64.

        If z holds two latents, D is twice the width of the embedding. The first half of x is then zero.
        """
        x = F.pad(self.embed(input_ids), (int(self.layer.backbone.d_model or 0) - self.d_read, 0))
        return x.to(kernels.autocast_dtype(x))

    def answers(self, z: Tensor) -> Tensor:
        """Logits (B, C, V) of the iterates ``z`` (B, C, D)."""
        logits: Tensor = self.head(z[..., : self.d_read])
        return logits

    def forward(
        self, input_ids: Tensor, z0: Tensor | None = None, fresh: Tensor | None = None,
        solve: SolveOptions | None = None,
    ) -> BoardOutput:  # fmt: skip
        """Predict the answers of boards.

        Args:
            input_ids: (B, C) int64 tokens of the questions.
            z0: (B, C, D) initial iterates; by default the layer's guess.
            fresh: (B, C) bool, the cells that start at the layer's guess instead of at ``z0``; or (B, 1) for
                whole boards.
            solve: solve options; by default the layer's solve options.

        Raises:
            ValueError: ``fresh`` has neither shape (B, C) nor (B, 1); ``z0`` does not have the shape of x.
        """
        x = self.inputs(input_ids)
        if not isinstance(self.layer, ImplicitSequenceLayer):
            out = self.layer(x)
            return BoardOutput(self.answers(out.z), out.z)
        if z0 is not None and fresh is not None:
            if fresh.shape not in (x.shape[:2], (len(x), 1)):
                raise ValueError(f"fresh must have shape (B, C) or (B, 1), got {tuple(fresh.shape)}")
            z0 = torch.where(fresh[..., None], self.start(x, None), z0)
        out = self.layer(x, z0=z0, solve=solve)
        return BoardOutput(self.answers(out.z), out.z, out.solution)

    def start(self, x: Tensor, number: int | None) -> Tensor:
        """The initial iterates (B, C, D) of start ``number``; with ``None``, new ones, as in training."""
        assert isinstance(self.layer, ImplicitSequenceLayer)
        solve = self.layer.solve if number is None else self.layer.eval_solve
        found = solve.guess.propose(x, number, None)
        return torch.zeros_like(x) if found is None else found


def check_guess(layer: ImplicitSequenceLayer) -> None:
    """Raise ``ValueError`` if a guess of ``layer`` needs the token before: a board has none."""
    if any(isinstance(solve.guess, Previous) for solve in (layer.train_solve, layer.eval_solve)):
        raise ValueError("the guess of a board must not be previous: a board has no token before it")


def explicit(backbone: Mapping[str, Any]) -> dict[str, Any]:
    """The explicit twin's backbone: ``backbone``, or the map of a recursion, without injection."""
    found = backbone.get("map", backbone)
    return {**(found if isinstance(found, Mapping) else {"name": found}), "injection": False}


def _pair(part: Any) -> Any:
    """Turn a list into a tuple: JSON stores the tuple of a pair as a list."""
    return tuple(part) if isinstance(part, list) else part
