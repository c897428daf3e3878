"""Makes a backbone from any PyTorch module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq.backbone import Backbone, Context, State, Trace, take_tokens
from deqseq.backbones.blocks import check_sizes
from deqseq.checks import check_count, check_flag, check_instance


class ModuleBackbone(Backbone):
    """f(z, x) = module(z + x) for any module (B, L, D) -> (B, L, D).

    If ``causal`` is true, the module must be causal. This is not checked. With a window or a state, every
    evaluation runs the module over all past inputs too. This is correct for any causal module, but slow. For
    a faster recurrent module, write your own :class:`~deqseq.Backbone` with a state.

    Args:
        module: the map; its output has the shape of its input.
        injection: module applied to x once per forward pass. Its output has the shape of z and is added
            to z. Default: identity.
        d_model: required width D of the inputs; by default any width is accepted.
        causal: false if the module uses later tokens. All sequences in a call must then be equally long.

    Raises:
        ValueError: ``module`` is a backbone, or no module; another argument has a wrong type or value.
    """

    rewinds = True

    def __init__(
        self, module: nn.Module, injection: nn.Module | None = None, d_model: int | None = None,
        causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        check_instance("module", module, nn.Module, "a module")
        if isinstance(module, Backbone):
            raise ValueError(f"{type(module).__name__} is a backbone already: use it without ModuleBackbone")
        check_instance("injection", injection, nn.Module | None, "a module, or None for the identity")
        if d_model is not None:
            check_sizes(d_model=d_model)
        check_flag("causal", causal)
        self.module = module
        self.injection = nn.Identity() if injection is None else injection
        self.d_model = d_model
        self.causal = causal

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        return Context((self.injection(x),))

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        injected = context.tokens[0]
        if injected.shape != z.shape:
            raise ValueError(
                f"an injection must return a tensor of z's shape {tuple(z.shape)}, "
                f"{type(self.injection).__name__} returned {tuple(injected.shape)}"
            )
        inputs = z + injected
        if state is None:
            return _called(self.module, inputs), inputs
        past = state.layers[0][0].to(inputs.dtype)
        past = past if past.shape[1] else inputs.new_zeros(inputs.shape[0], 0, inputs.shape[2])
        line, index = _line(past, state.seen, inputs)
        return take_tokens(_called(self.module, line), index), inputs

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the module. The arguments are passed to :func:`torch.compile`.

        A copy of a compiled backbone is not compiled.
        """
        self.module.compile(*args, **options)

    def initial_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """An empty state. The tensor of past inputs has shape (B, 0, 0)."""
        check_count("batch_size", batch_size, least=0)
        weight = next(self.parameters(), None)
        device = weight.device if device is None and weight is not None else device
        empty = torch.zeros(batch_size, 0, 0, device=device, dtype=dtype)
        return State(torch.zeros(batch_size, dtype=torch.int64, device=device), ((empty,),))

    def reserve(self, state: State, z: Tensor) -> State:
        past = state.layers[0][0]
        added = z.new_zeros(z.shape)
        return State(state.seen, ((torch.cat([past, added], 1) if past.shape[1] else added,),))

    def keep_last(self, state: State, tokens: int) -> State:
        check_sizes(tokens=tokens)
        (past,) = state.layers[0]
        if not past.shape[1]:
            return state
        gone = (state.seen - tokens).clamp_min(0)
        kept = gone[:, None] + torch.arange(min(tokens, past.shape[1]), device=gone.device)
        return State(state.seen - gone, ((take_tokens(past, kept.clamp_max(past.shape[1] - 1)),),))

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        (past,) = state.layers[0]
        line, _ = _line(past, state.seen, trace)
        return State(state.seen + count, ((line[:, : past.shape[1]],),))


def _called(module: nn.Module, inputs: Tensor) -> Tensor:
    out = module(inputs)
    if not isinstance(out, Tensor) or out.shape != inputs.shape:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"a module must return a tensor of its input's shape {tuple(inputs.shape)}, "
            f"{type(module).__name__} returned {found}"
        )
    # If the compiled module is a CUDA graph, the next evaluation overwrites its result. So copy it.
    return out if module._compiled_call_impl is None else out.clone()


def _line(past: Tensor, seen: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Append the new ``inputs`` (B, W, D) to the first ``seen`` (B,) inputs in ``past``.

    Returns a tensor of past and new inputs, and the indices (B, W) of the new inputs in it.
    """
    line = F.pad(past, (0, 0, 0, inputs.shape[1]))
    index = seen[:, None] + torch.arange(inputs.shape[1], device=inputs.device)
    return line.scatter(1, index[..., None].expand_as(inputs), inputs.to(past.dtype)), index
