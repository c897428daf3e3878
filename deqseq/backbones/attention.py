"""Causal attention functions from transformers' attention interface, selected by name.

Shapes: B sequences, W tokens, D width, H query heads, J key/value heads, P head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_FLASH = {
    "flash_attention_2": "flash-attn (pip install 'deqseq[flash]')",
    "flash_attention_3": "flash-attn-3 (the folder hopper of github.com/Dao-AILab/flash-attention)",
    "flash_attention_4": "flash-attn-4 (pip install flash-attn-4)",
}


class AttentionFunction:
    """One of transformers' attention functions, called without a cache of earlier keys and values.

    Raises:
        ValueError: ``name`` is unknown; transformers cannot be imported; or the package that contains the
            function, such as flash-attn, cannot be imported.
    """

    def __init__(self, name: str) -> None:
        try:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        except ImportError as error:
            raise ValueError(
                f"attention {name!r} needs transformers (pip install 'deqseq[lm]'), which cannot be "
                f"imported ({error}); 'sdpa' needs only torch"
            ) from error
        known = {key: value for key, value in ALL_ATTENTION_FUNCTIONS.items() if not key.startswith("paged|")}
        if "eager" not in known:
            # Use Llama's eager attention: transformers registers none, because every model defines its own.
            from transformers.models.llama.modeling_llama import eager_attention_forward

            known["eager"] = eager_attention_forward
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"unknown attention {name!r}; known: {', '.join(sorted(known))}")
        if name in _FLASH:
            from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

            try:
                lazy_import_flash_attention(name)
            except Exception as error:  # a package built for another torch version may raise any error
                raise ValueError(
                    f"attention {name!r} needs a GPU and {_FLASH[name]}, which does not work here: {error}"
                ) from error
        self.name = name
        self.config = SimpleNamespace(_attn_implementation=name)
        self._function: Callable[..., tuple[Tensor, Any]] = known[name]
        self._mask: Callable[..., Any] | None = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
        self._on_cpu: Callable[..., tuple[Tensor, Any]] | None = None
        if name == "flex_attention":  # only for this name, because disable() imports Triton
            self._on_cpu = functools.partial(torch.compiler.disable(_uncompiled), self._function)

    def __reduce__(self) -> tuple[type[AttentionFunction], tuple[str]]:
        return AttentionFunction, (self.name,)

    def mask(self, z: Tensor) -> Any:
        """The causal mask for z (B, W, D), in the format that the attention function expects.

        ``None`` if the attention function needs no mask.
        """
        batch, tokens, _ = z.shape
        if self.name == "flex_attention":
            return _block_mask(tokens, z.device)
        if self._mask is None:
            return None
        return self._mask(batch_size=batch, q_length=tokens, kv_length=tokens, dtype=z.dtype, device=z.device)

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Compute attention for q (B, H, W, P), k and v (B, J, W, P). Returns a tensor (B, W, H, P).

        Attention functions read the attributes ``training``, ``config``, ``is_causal`` and
        ``num_key_value_groups`` of ``module``.
        """
        if self.name in _FLASH and q.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"attention {self.name!r} computes in float16 or bfloat16, got {q.dtype}: use autocast, or a "
                "model in one of these types"
            )
        function = self._on_cpu if self._on_cpu and q.device.type == "cpu" else self._function
        return function(module, q, k, v, mask, dropout=0.0, scaling=q.shape[-1] ** -0.5)[0]


def _uncompiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``function`` without compiling it.

    On the CPU, compiled flex attention gives wrong results in torch 2.13, for example at 24, 40 or 72 tokens.
    """
    with torch.compiler.set_stance("force_eager"):
        return function(*args, **options)


@functools.lru_cache(maxsize=16)
def _block_mask(tokens: int, device: torch.device) -> Any:
    """The causal mask of flex attention for ``tokens`` tokens. All sequences and heads share this mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    # Make the mask outside inference mode, because autograd cannot save tensors from inference mode. The mask
    # is cached, and a later call may need it for a backward pass.
    with torch.inference_mode(False):
        return create_block_mask(
            _causal, None, None, tokens, tokens, device=str(device), _compile=device.type != "cpu"
        )


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
