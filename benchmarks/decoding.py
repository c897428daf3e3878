"""Section decode of ``speed.py``: times of a token in ``generate``, ``fast_generate`` and ``stream``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import common
import torch
import torch.profiler
from common import Row
from torch import Tensor

from deqseq.causal_lm import ImplicitForCausalLM, fast_generate, stream

if TYPE_CHECKING:
    from speed import Bench


@torch.no_grad()
def decode(bench: Bench, name: str, form: str, batch: int, reference: float | None) -> Row:
    """Time greedy decoding after a prompt of 16 tokens, in three ways.

    The ways are ``generate``, ``generate`` with ``fast_generate``, and ``stream``. Each generates a short and
    a long text. The difference of the two times gives the time of a token. The rest is the start: the prompt,
    and the recording of CUDA graphs. The processor time is the CPU time of this process. On a busy machine,
    it varies less than wall-clock time. On a GPU, it includes waiting for the GPU.
    """
    model = bench.model(bench.config(name, form)).bfloat16().eval()
    model.generation_config.eos_token_id = None  # no text ends early
    prompt = torch.randint(model.config.vocab_size, (batch, 16), device=bench.device)
    short, long = (2, 4) if bench.quick else (32, 160)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    fast = {"custom_generate": fast_generate}
    ways: dict[str, Callable[[int], Tensor]] = {
        "generate": lambda n: model.generate(prompt, max_new_tokens=n, **options)[:, 16:],
        "fast": lambda n: model.generate(prompt, max_new_tokens=n, **options, **fast)[:, 16:],
        "stream": lambda n: torch.stack(list(stream(model, prompt, max_new_tokens=n, **options)), 1),
    }
    row: Row = {}
    for way, write in ways.items():
        token, host, start = [], [], []
        for _ in range(bench.repeats + 1):
            wall, cpu = clocks(partial(write, short), bench.device)
            wall_long, cpu_long = clocks(partial(write, long), bench.device)
            token.append(1e3 * (wall_long - wall) / (long - short))
            host.append(1e3 * (cpu_long - cpu) / (long - short))
            start.append(1e3 * wall - (short - 1) * token[-1])  # the prompt gives the first token
        # The first repeat is a warm-up.
        ms, cpu, first = (statistics.median(values[1:]) for values in (token, host, start))
        row |= {f"{way} ms": ms, f"{way} processor ms": cpu, f"{way} start ms": first}
    if bench.device != "cpu":
        busy = kernel_milliseconds(partial(ways["stream"], long))
        busy -= kernel_milliseconds(partial(ways["stream"], short))
        row["stream busy"] = busy / (long - short) / row["stream ms"]
    expected = ways["generate"](long)
    found = [(ways[way](long) == expected).float().mean().item() for way in ("fast", "stream")]
    return {
        **row, **bench.against(row["generate ms"], reference),
        **{f"{way} tokens/s": 1e3 * batch / row[f"{way} ms"] for way in ways},
        "equal tokens": min(found), "iterations a token": iterations(model, prompt, short),
    }  # fmt: skip


def clocks(function: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds of wall-clock time and of processor time that ``function`` takes."""
    start = time.process_time()
    wall = common.stopwatch(function, device)
    return wall, time.process_time() - start


def kernel_milliseconds(function: Callable[[], Any]) -> float:
    """The sum of the times of all kernels that ``function`` runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def iterations(model: ImplicitForCausalLM, prompt: Tensor, count: int) -> float:
    """The mean number of iterations for a new token; 1 for an explicit model."""
    out, found = model(prompt, use_cache=True, logits_to_keep=1), []
    for _ in range(count):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        if out.solution is None:
            return 1.0
        found.append(out.solution.iterations)
    return torch.cat(found).float().mean().item()
