"""The cache of a language model, with the interface of transformers' caches.

Shapes: B sequences, C columns seen so far (tokens and padding), L columns of a call, D width.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from deqseq.backbone import State, take_tokens


class StateLayer(CacheLayerMixin):
    """The only layer of an :class:`EquilibriumCache`. It holds the backbone's state.

    All blocks are solved together, so one layer holds the states of all blocks. The state of a Llama block
    has one key and one value per token. The state of a Mamba2 block has a constant size.

    Attributes:
        state: the backbone's state; ``None`` before the first call of a cache that was made without a state.
        equilibrium: (B, D) the equilibrium of each sequence's last token; ``None`` if it is unknown.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, rewinds: bool, state: State | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_croppable = rewinds
        self.reset(state)

    def reset(self, state: State | None = None) -> None:
        self.state = state
        self.equilibrium: Tensor | None = None
        # Store the number of tokens in ``state``, not their mask. The state may cover millions of tokens.
        self._earlier = None if state is None else state.seen.clone()  # (B,) number of tokens in ``state``
        self._earlier_columns = 0 if state is None else int(state.seen.max())
        self._called: Tensor | None = None  # (B, columns of all calls) bool, false for padding

    @property
    def real(self) -> Tensor | None:
        """(B, C) bool, true for tokens and false for padding; ``None`` if there are no columns.

        If the constructor got a ``state``, the state's tokens are the first columns. The state's shorter
        sequences are padded at the front.
        """
        if self._earlier is None:
            return self._called
        column = torch.arange(self._earlier_columns, device=self._earlier.device)
        earlier = column >= self._earlier_columns - self._earlier[:, None]
        return earlier if self._called is None else torch.cat([earlier, self._called], 1)

    def starting_state(self, fresh: State) -> State:
        """The state that a call starts from: the cached state, or ``fresh`` if the cache has no state.

        Raises:
            ValueError: the cache has another number of sequences, was filled in another data type or on
                another device, or belongs to another model.
        """
        if self.state is None:
            return fresh
        if self.state.batch_size != fresh.batch_size:
            raise ValueError(
                f"the cache holds {self.state.batch_size} sequences, the call has {fresh.batch_size}"
            )
        if not _same_form(self.state, fresh):
            raise ValueError(
                "the cache belongs to another model, or was filled in another type or on another device"
            )
        return self.state

    def commit(self, state: State, z: Tensor, attention_mask: Tensor | None) -> None:
        """Store the results of a call.

        Args:
            state: the backbone's state after the call's last token.
            z: (B, L, D) the call's equilibria. The cache keeps only the equilibrium of each sequence's last
                real token.
            attention_mask: (B, L), 1 or true for real tokens; ``None``: all tokens are real.
        """
        real = (z.new_ones(z.shape[:2]) if attention_mask is None else attention_mask).bool()
        place = torch.arange(1, z.shape[1] + 1, device=z.device)
        last = take_tokens(z, (real * place).argmax(1, keepdim=True))[:, 0]
        if self.equilibrium is not None:  # a sequence without tokens in this call keeps its equilibrium
            last = torch.where(real.any(1, keepdim=True), last, self.equilibrium)
        self.state = state
        self.equilibrium = last.detach()
        self._called = real if self._called is None else torch.cat([self._called, real], 1)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._earlier_columns + (0 if self._called is None else self._called.shape[1])

    def get_max_length(self) -> int:
        return -1  # no limit

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns: ``crop(-2)`` removes two, as in transformers.

        This cannot repair a sequence in which a removed token was not finite: the sequence stays NaN, because
        attention multiplies the removed values by zero. Before a call that may break, copy the cache with
        ``copy.deepcopy(cache)``.

        Raises:
            ValueError: ``tokens_to_remove`` is positive; the cache has too few columns; the state is
                recurrent, so it cannot forget tokens.
        """
        columns = self.get_seq_length()
        if not -columns <= tokens_to_remove <= 0:
            raise ValueError(f"crop takes a number from -{columns} to 0, got {tokens_to_remove}")
        if tokens_to_remove == 0 or self.state is None:
            return
        if not self.is_croppable:
            raise ValueError(
                "this model's state is recurrent and cannot forget its last tokens: copy the cache before "
                "a call that you may have to undo"
            )
        kept = columns + tokens_to_remove
        seen = torch.zeros_like(self.state.seen)
        if self._earlier is not None:
            removed = max(0, self._earlier_columns - kept)
            self._earlier = seen = (self._earlier - removed).clamp_min(0)
            self._earlier_columns -= removed
        if self._called is not None:
            self._called = self._called[:, : kept - self._earlier_columns]
            seen = seen + self._called.sum(1)
        # Change only `seen`, and leave the removed keys and values in place. Attention gives them the weight
        # zero, and new tokens overwrite them.
        self.state = State(seen, self.state.layers)
        self.equilibrium = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(self.state.batch_size, device=self.state.seen.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is None:
            return
        indices = indices.to(self.state.seen.device)
        self.state = self.state.select(indices)
        self._earlier = None if self._earlier is None else self._earlier[indices]
        self._called = None if self._called is None else self._called[indices]
        self.equilibrium = None if self.equilibrium is None else self.equilibrium[indices]

    def offload(self) -> None:
        raise ValueError("an EquilibriumCache stays on its device: it cannot be offloaded")

    prefetch = offload

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("only deqseq's language models can fill an EquilibriumCache")

    lazy_initialization = update


def _same_form(state: State, fresh: State) -> bool:
    """Whether ``state`` and ``fresh`` agree in layers, types, devices and sizes.

    A size of 0 in ``fresh`` agrees with every size, because a fresh cache of keys and values has no tokens.
    """
    if [len(layer) for layer in state.layers] != [len(layer) for layer in fresh.layers]:
        return False
    pairs = zip(itertools.chain(*state.layers), itertools.chain(*fresh.layers), strict=True)
    return all(
        (values.dim(), values.dtype, values.device) == (new.dim(), new.dtype, new.device)
        and all(wanted in (0, size) for size, wanted in zip(values.shape, new.shape, strict=True))
        for values, new in pairs
    )


class EquilibriumCache(Cache):
    """The models' ``past_key_values``: the backbone's state after the tokens of all earlier calls.

    ``model(..., use_cache=True)`` and ``generate`` make a cache. Beam search can reorder the cache's
    sequences. In the cache of an attention model, ``crop(-n)`` removes the last n columns. A sequence with a
    token that was not finite stays NaN after ``crop``. The state of a recurrent model (Mamba2) cannot forget
    tokens, so ``crop`` raises ``ValueError`` for such a model.

    Args:
        rewinds: whether the last tokens can be removed; see :attr:`~deqseq.Backbone.rewinds`.
        state: backbone state to continue; by default the cache is empty. The state's tokens count as columns.
            The state's shorter sequences are padded at the front.
    """

    def __init__(self, rewinds: bool, state: State | None = None) -> None:
        self.content = StateLayer(rewinds, state)
        super().__init__(layers=[self.content])

    @property
    def state(self) -> State | None:
        """The backbone's state after the last token."""
        return self.content.state
