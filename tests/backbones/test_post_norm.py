"""Post-norm blocks: u <- norm(u + mixer(u)), then u <- norm2(u + mlp(u)), without a final norm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import Backbone, FixedIterations, ImplicitSequenceLayer
from deqseq.backbones import LlamaBackbone

D = 8


def llama(**options: Any) -> LlamaBackbone:
    return LlamaBackbone(**{"d_model": D, "n_layer": 2, "n_head": 2, "d_inner": 12, "causal": False,
                            "post_norm": True, **options})  # fmt: skip


def rms(u: Tensor, norm: nn.RMSNorm) -> Tensor:
    return u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


@torch.no_grad()
def test_against_the_equations() -> None:
    """Compare the backbone with its equations, written out in this test.

    The equations leave out the rotary position embedding. It has no effect, because all positions are 0.
    """
    f = llama(n_head=1, weight_norm=False).double()
    for norm in (module for module in f.modules() if isinstance(module, nn.RMSNorm)):
        nn.init.normal_(norm.weight)
    z, x = torch.randn(2, 3, 5, D, dtype=torch.float64)
    u = z
    for block in f.layers:
        m, mlp = block.mixer, block.mlp
        injected = f.injection(x).split(D, -1)
        q, k, v = (part(u) + i for part, i in zip((m.wq, m.wk, m.wv), injected, strict=True))
        mixed = (q @ k.mT / D**0.5).softmax(-1) @ v
        u = rms(u + m.out_proj(mixed), block.norm)
        u = rms(u + mlp.fc2(F.silu(mlp.w1(u)) * mlp.w3(u)), block.norm2)
    found = f(z, f.prepare(x, torch.zeros(3, 5, dtype=torch.int64)))
    torch.testing.assert_close(found, u, rtol=1e-6, atol=1e-7)


def test_gradients_of_one_evaluation(fold_on_gpu: Callable[[Backbone], Backbone]) -> None:
    f = fold_on_gpu(llama(d_model=4, d_inner=3).double())
    z, x = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    tensors = (z.requires_grad_(), x.requires_grad_(), *f.parameters())
    assert torch.autograd.gradcheck(lambda *_: f(z, f.prepare(x)), tensors)


def test_every_parameter_takes_part() -> None:
    f = llama()
    assert not any("norm_f" in name for name in f.state_dict())
    assert "norm_f.weight" in llama(post_norm=False).state_dict()
    z, x, weight = torch.randn(3, 2, 5, D)
    (f(z, f.prepare(x)) * weight).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in f.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_type_of_z(dtype: torch.dtype) -> None:
    f = llama()
    z, x = torch.randn(2, 2, 5, D)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16), torch.no_grad():
        found = f(z.to(dtype), f.prepare(x.to(dtype)))
        assert found.dtype == dtype
    torch.testing.assert_close(found.float(), f(z, f.prepare(x)), rtol=0.1, atol=0.1)


def test_the_solve_runs_compiled_blocks(counting: Any, unset_default_device: Callable[[], None]) -> None:
    layer = ImplicitSequenceLayer(llama(), convergence=FixedIterations(3)).eval()
    x = torch.randn(2, 5, D)
    with torch.no_grad():
        expected = layer(x).z
        layer.backbone.compile(backend=counting, fullgraph=True)
        unset_default_device()
        out = layer(x)
    assert counting.runs == 2 * out.solution.nfe  # each evaluation runs two blocks
    torch.testing.assert_close(out.z, expected)


def test_decoding_needs_pre_norm() -> None:
    with pytest.raises(ValueError, match="post_norm needs causal=False, got post_norm=True with causal=True"):
        llama(causal=True)
    with pytest.raises(ValueError, match="post_norm must be true or false, got 1"):
        llama(post_norm=1)
