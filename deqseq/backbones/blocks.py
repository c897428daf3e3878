"""Parts that backbones share: a stack of blocks with injection, gated MLPs, effective weights, checks.

An effective weight is a module's weight after weight normalisation and adapters are applied. Backbones
compute effective weights once per forward pass, in ``prepare``, and pass them to the blocks.

Shapes: B sequences, L tokens, W tokens in the window, D width.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized

from deqseq import kernels
from deqseq.backbone import Backbone, Context, State, Trace
from deqseq.backbones.weights import (
    LinearMaps,
    active_norm,
    check_merged,
    is_adapter,
    is_quantised,
    kept,
    projection,
)
from deqseq.checks import check_count, check_flag, check_not_sharded, check_positive
from deqseq.ops.add_norm import add_norm
from deqseq.ops.fan_out import fan_out
from deqseq.ops.one_token import Norm, SwiGLUWeights, ValueGateWeights

RMS_EPS = 1e-5
_MOST_BLOCKS = 4096


class Prepared(NamedTuple):
    """The values that a stack stores in ``Context.shared``.

    Attributes:
        choice: the kernels that compute this forward pass.
        weights: the effective weights of every block.
        padded: true if the last tensor of ``Context.tokens`` is a padding mask, (B, L) bool. The mask is true
            for real tokens.
    """

    choice: kernels.Choice
    weights: list[Any]
    padded: bool = False


class StackTrace(NamedTuple):
    """The data from which a stack's ``advance`` computes the next state.

    Attributes:
        implementation: that of ``advance``, a name in :mod:`deqseq.kernels`.
        blocks: the trace of every block.
    """

    implementation: str
    blocks: list[Any]


class Block(nn.Module):
    """A mixer and an optional MLP. Their outputs are added to the residual stream u.

    A pre-norm block (the default) normalises the inputs of the mixer and the MLP: u <- u + mixer(norm(u)),
    then u <- u + mlp(norm2(u)). The block returns its last output (of the MLP, or of the mixer if there is no
    MLP) without adding it to u. The next block, or the final norm, adds this output to u and normalises the
    sum. One kernel can do both.

    A post-norm block normalises the sums: u <- norm(u + mixer(u)), then u <- norm2(u + mlp(u)).
    """

    def __init__(
        self, d_model: int, norm_eps: float, mixer: nn.Module, mlp: nn.Module | None, post_norm: bool = False
    ) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer: Any = mixer
        self.norm2 = None if mlp is None else nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp: Any = mlp

    def weights(self, x: Tensor) -> tuple[Any, Any]:
        """Effective weights of the mixer and of the MLP, in the dtype for the layer's input ``x``."""
        return self.mixer.weights(x), None if self.mlp is None else self.mlp.weights(x)

    def norms(self) -> tuple[Norm, Norm | None]:
        """Weight and eps of both norms, for fused kernels. Without an MLP, the second norm is ``None``."""
        first = active_norm(self.norm)
        second = None if self.norm2 is None else active_norm(self.norm2)
        return (first.weight, first.eps), None if second is None else (second.weight, second.eps)

    def by_parts(
        self, stream: Tensor, added: Tensor | None, weights: tuple[Any, Any], implementation: str,
        *inputs: Any,
    ) -> tuple[Tensor, Tensor | None, Any]:  # fmt: skip
        """Compute the block with several kernels, one for each operation.

        Args:
            added: the previous block's last output. This block adds it to ``stream``. ``None`` if there is
                nothing to add.
            inputs: the arguments that the mixer gets after its weights.

        Returns:
            The stream, the output of the block's last part (MLP or mixer), and the mixer's trace. The stream
            does not contain this output yet; the next block adds it. A post-norm block adds it itself and
            returns ``None`` instead.
        """
        if self.post_norm:
            added, trace = self.mixer(linear_input(stream), weights[0], *inputs)
            stream = add_norm(stream, added, active_norm(self.norm), implementation, last=True)[1]
            if self.norm2 is not None:
                added = self.mlp(linear_input(stream), weights[1])
                stream = add_norm(stream, added, active_norm(self.norm2), implementation, last=True)[1]
            return stream, None, trace
        stream, u = add_norm(stream, added, active_norm(self.norm), implementation)
        added, trace = self.mixer(u, weights[0], *inputs)
        if self.norm2 is not None:
            stream, u = add_norm(stream, added, active_norm(self.norm2), implementation)
            added = self.mlp(u, weights[1])
        return stream, added, trace


class Stack(Backbone):
    """A stack of blocks and a final norm. Every block adds the same injection.

    A subclass that keeps a state sets ``state_shapes``: the shapes of the tensors in one block's initial
    state, without the batch dimension.

    Args:
        blocks: modules with a method ``weights(x)``; ``x`` is the layer's input.
        d_model: width D.
        width: output width of the injection W RMSNorm(x) + b.
        norm_eps: constant that every norm adds to the mean square.
        weight_norm: if true, every linear map and convolution has weight normalisation.
        injection: if true, every block adds the injection. False makes the plain stack of an explicit layer.
        input_skip: if true, the first block gets ``gain * z + x``, with a learned ``gain`` (D,).
        post_norm: if true, the blocks are post-norm, and there is no final norm.

    Raises:
        ValueError: ``norm_eps`` is not finite and positive, or ``input_skip`` is set without ``injection``.
    """

    d_model: int
    state_shapes: tuple[tuple[int, ...], ...]

    def __init__(
        self, blocks: Iterable[nn.Module], d_model: int, width: int, norm_eps: float, weight_norm: bool,
        injection: bool, input_skip: bool, post_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_positive("norm_eps", norm_eps)  # with eps 0, RMSNorm of zeros is NaN
        for name, value in ("weight_norm", weight_norm), ("injection", injection), ("input_skip", input_skip):
            check_flag(name, value)
        if input_skip and not injection:
            raise ValueError("input_skip needs injection=True: an explicit layer passes x as z")
        self.d_model = d_model
        self.layers = nn.ModuleList(blocks)
        self.norm_f = None if post_norm else nn.RMSNorm(d_model, eps=norm_eps)
        self.injects = injection
        self.injection = Injection(d_model, width, norm_eps) if injection else None
        self.input_skip = InputSkip(d_model) if input_skip else None
        self.initialise()
        if weight_norm:  # in every output row w = g v / ||v|| (Salimans & Kingma, 2016); g starts at ||w||
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Conv1d)):
                    # On GPUs torch computes the weight w in float32, even if the module is float64.
                    parametrizations.weight_norm(module)
                    setattr(type(module), "register_parameter", _register_parameter)  # noqa: B010 - for mypy

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """Whether CUDA graphs can record the backbone: true if it has no adapters and no quantised weights.

        A recorded graph would not notice that an adapter is switched or merged. Dequantising may make the
        host wait.
        """
        return not any(is_adapter(part) or is_quantised(part) for part in self._parts())

    def _parts(self) -> Iterator[nn.Module]:
        """The blocks, their mixers, MLPs and norms, and the linear maps in mixers, MLPs and the injection."""
        mixers_and_others = [part for block in self.layers for part in block._modules.values()]
        for holder in (self, self.injection, self.layers, *self.layers, *mixers_and_others):
            if holder is not None:
                yield from (part for part in holder._modules.values() if part is not None)

    def initialise(self) -> None:
        """Set the initial weights. By default, keep the weights that torch's modules start with.

        ``__init__`` calls this method before it applies weight normalisation.
        """

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        check_not_sharded(self._parts())
        check_dtype(x, self.layers)
        blocks: Any = self.layers
        weights = kept(self, x, lambda: [block.weights(x) for block in blocks])
        shared = Prepared(kernels.choose(x), weights)
        return self.prepare_next(x, position_ids, Context(shared=shared))

    def prepare_next(self, x: Tensor, position_ids: Tensor | None, context: Context) -> Context:
        tokens = () if self.injection is None else (self.injection(x),)
        if self.input_skip is not None:
            tokens = (*tokens, x)
        return Context(tokens, context.shared)

    def enter(self, z: Tensor, tokens: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """The stream (B, W, D) before the first block, and the injection (``None`` if there is none).

        ``tokens``: the tensors that ``Stack.prepare_next`` puts into ``Context.tokens``.
        """
        injection = tokens[0] if tokens else None
        return z if self.input_skip is None else self.input_skip(z, tokens[1]), injection

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        stream, injection = self.enter(z, context.tokens)
        return self.through(stream, context, state, kernels.effective(context.shared.choice), injection)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile every block. The arguments are passed to :func:`torch.compile`.

        A copy of a compiled backbone is not compiled. Do not compile Mamba2: it has its own kernels.
        """
        for block in self.layers:
            block.compile(*args, **options)

    def through(
        self, stream: Tensor, context: Context, state: State | None, choice: kernels.Choice,
        injection: Tensor | None = None, *inputs: Any,
    ) -> tuple[Tensor, StackTrace]:  # fmt: skip
        """Apply all blocks and the final norm, if there is one. Returns f(z) (B, W, D) and the trace.

        ``inputs``: further arguments that are passed to every block.
        """
        added, traces, weights = None, [], context.shared.weights
        injections = fan_out(injection, len(self.layers), choice.others)
        for i, block in enumerate(self.layers):
            before = None if state is None else state.layers[i]
            stream, added, trace = block(stream, added, weights[i], before, choice, injections[i], *inputs)
            traces.append(trace)
        if self.norm_f is not None:
            stream = add_norm(stream, added, active_norm(self.norm_f), choice.others, last=True)[1]
        return stream, StackTrace(choice.others, traces)

    def initial_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """A state of zeros, by default with the device and dtype of the weights."""
        check_count("batch_size", batch_size, least=0)
        weight = next(self.layers.parameters())
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        layer = tuple(torch.zeros(batch_size, *s, device=device, dtype=dtype) for s in self.state_shapes)
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return State(seen, (layer,) * len(self.layers))


def _register_parameter(linear: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Raise ``ValueError`` if a tool for quantisation or pruning sets the weight of a weight-normalised map.

    torch gives every parametrised map a class of its own, and this function becomes a method of this class.
    """
    if is_parametrized(linear, name.removesuffix("_orig")):
        raise ValueError(
            f"this map is weight-normalised, so its {name} cannot be set: call "
            "deqseq.backbones.fold_weight_norm(model) first, which makes plain maps"
        )
    nn.Module.register_parameter(linear, name, param)


class Injection(LinearMaps):
    """The injection W RMSNorm(x) + b, (B, L, width), of the layer's input x (B, L, D)."""

    def __init__(self, d_model: int, width: int, norm_eps: float = RMS_EPS) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.linear = nn.Linear(d_model, width)

    def forward(self, x: Tensor) -> Tensor:
        check_merged(self.linear)
        u = self.norm(x)
        base: Any = getattr(self.linear, "base_layer", self.linear)
        # Do not call quantised maps: bitsandbytes' forward rounds inputs too, and repacks weights in place.
        if is_quantised(base):
            return F.linear(linear_input(u), projection(self.linear, x), base.bias.to(u.dtype))
        # Compute the map here, with kept weights, unless a hook or accelerate changes its call.
        hooks = self.linear._forward_hooks or self.linear._forward_pre_hooks
        if is_parametrized(self.linear) and not hooks and "forward" not in vars(self.linear):
            return F.linear(u, kept(self.linear, x, lambda: self.linear.weight), self.linear.bias)
        out: Tensor = self.linear(u)
        return out


class InputSkip(nn.Module):
    """The stream before the first block: gain * z + x (B, W, D). The gain (D,) is initialised to 0."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(d_model))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, self.gain.to(x.dtype), z)


class ValueGateMLP(LinearMaps):
    """fc2(value * silu(gate)) with (value, gate) = fc1(x), without biases.

    The hidden width is ``d_inner`` rounded up to a multiple of 128.
    """

    def __init__(self, d_model: int, d_inner: int) -> None:
        super().__init__()
        hidden = -(-d_inner // 128) * 128
        self.fc1 = nn.Linear(d_model, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, d_model, bias=False)

    def weights(self, x: Tensor) -> ValueGateWeights:
        return ValueGateWeights(projection(self.fc1, x), projection(self.fc2, x))

    def forward(self, x: Tensor, weights: ValueGateWeights) -> Tensor:
        value, gate = F.linear(x, weights.into).chunk(2, dim=-1)
        return F.linear(value * F.silu(gate), weights.out)


class SwiGLU(LinearMaps):
    """fc2(silu(w1 x) * w3 x) with hidden width int(2 d_inner / 3), no biases (Shazeer, 2020)."""

    def __init__(self, d_model: int, d_inner: int) -> None:
        super().__init__()
        hidden = 2 * d_inner // 3
        self.w1 = nn.Linear(d_model, hidden, bias=False)
        self.w3 = nn.Linear(d_model, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, d_model, bias=False)

    def weights(self, x: Tensor) -> SwiGLUWeights:
        return SwiGLUWeights(projection(self.w1, x), projection(self.w3, x), projection(self.fc2, x))

    def forward(self, x: Tensor, weights: SwiGLUWeights) -> Tensor:
        hidden = F.silu(F.linear(x, weights.gate)) * F.linear(x, weights.value)
        return F.linear(hidden, weights.out)


def linear_input(stream: Tensor) -> Tensor:
    """Convert ``stream`` to the dtype in which autocast computes linear maps."""
    return stream.to(kernels.autocast_dtype(stream))


def check_dtype(x: Tensor, blocks: nn.ModuleList) -> None:
    """Raise ``ValueError`` if no weight of the first block has the dtype of ``x``.

    If autocast is on, the dtypes after its conversion are compared.
    """
    if any(weight.dtype == x.dtype for weight in blocks[0].parameters()):  # usually the first weight matches
        return
    dtypes = {kernels.autocast_dtype(weight) for weight in blocks[0].parameters()}
    if dtypes and kernels.autocast_dtype(x) not in dtypes:
        weights = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"x is {x.dtype}, but the backbone's weights are {weights}: convert x or the backbone with "
            ".to(dtype), or use torch.autocast"
        )


def check_hidden(**sizes: int) -> None:
    """Raise ``ValueError`` if a size is below 2. A :class:`SwiGLU` with ``d_inner`` 1 has no hidden unit."""
    for name, value in sizes.items():
        if value < 2:
            raise ValueError(f"{name} must be at least 2, got {value}")


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` if a size is not an integer >= 1, or if ``n_layer`` is too large."""
    for name, value in sizes.items():
        check_count(name, value)
    if sizes.get("n_layer", 1) > _MOST_BLOCKS:  # surely a typo: so large a model takes minutes to build
        raise ValueError(f"n_layer must be at most {_MOST_BLOCKS}, got {sizes['n_layer']}")
