"""Records the step of a whole token as CUDA graphs: embedding, search, output layer and update of the memory.

With one token per sequence, launching the kernels takes longer than running them. A CUDA graph launches all
its kernels at once.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deqseq import graphs, kernels
from deqseq.backbones.weights import is_quantised
from deqseq.causal_lm.token_step import Memory, TokenStep
from deqseq.loop import drive, finish
from deqseq.problem import Problem
from deqseq.replay import MAX_SEQUENCES, RecordedSolve
from deqseq.trees import copied, overwrite


def can_record_step(step: TokenStep, memory: Memory) -> bool:
    """Whether ``step`` can be recorded, and is small enough for a recording to save time."""
    if len(memory.position_ids) > MAX_SEQUENCES:
        return False
    # Do not record adapters and quantised weights: a graph would not notice that an adapter is switched, and
    # dequantising may make the host wait.
    embedding, head = step.model.model.embed_tokens, step.model.lm_head
    if (
        (type(embedding), type(head)) != (nn.Embedding, nn.Linear)
        or is_quantised(embedding)
        or is_quantised(head)
    ):
        return False
    problem = step.problem(memory)
    parts = [step.layer.backbone]
    if problem is not None:
        parts += [problem.solver, problem.policy, problem.options.guess]
        if problem.group is not None:
            return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())
    return not hooked and graphs.can_record(step.x, *parts)


class RecordedStep(RecordedSolve):
    """Feeds one token of every sequence by replaying CUDA graphs of ``step``. The results are the same.

    A step that searches until convergence has three graphs. The first embeds the token and begins the search.
    The second runs some passes, and is replayed until all sequences have settled. The third updates the
    memory and computes the logits. Other steps, with a fixed number of iterations or an explicit model, have
    one graph.

    Args:
        step: the step to record; :func:`can_record_step` says whether this is possible.
        memory: the memory before the next call. Its state needs capacity for the tokens of all calls.

    Attributes:
        memory: the memory after the last call. It lies in buffers that every call overwrites.
    """

    def __init__(self, step: TokenStep, memory: Memory) -> None:
        self.memory = copied(memory)
        self._step = step
        self._ids = torch.zeros_like(memory.position_ids[:, 0])
        self._device = step.x.device
        self._whole: Callable[[], None] | None = None
        problem = step.problem(memory)
        with kernels.device_of(step.x):
            if problem is not None and not problem.fixed:
                self.record(self._device)
            else:
                (self._whole,) = graphs.capture(self._device, self._record_whole)
        overwrite(self.memory, memory)  # recording has run the step, and so has changed the buffers

    def __call__(self, ids: Tensor) -> Tensor:
        """Feed the tokens ``ids`` (B,). Returns the logits of the next token, (B, V) float32."""
        self._ids.copy_(ids)
        with kernels.device_of(self._ids):
            if self._whole is None:
                drive(self)
            else:
                self._whole()
        return self._logits.clone()  # the next call overwrites the original

    def make_problem(self) -> Problem:
        problem = self._step.problem(self.memory, self._ids)
        assert problem is not None
        return problem

    def record_end(self) -> None:
        solution = finish(self.problem, self.carry, 0)
        assert solution.state is not None
        self._keep(*self._step.result(solution.z, solution.state, self.memory))

    def finish(self) -> None:  # type: ignore[override]
        self._end()

    def _record_whole(self) -> None:
        self._keep(*self._step(self._ids, self.memory))

    def _keep(self, logits: Tensor, memory: Memory) -> None:
        self._logits = logits
        overwrite(self.memory, memory)
