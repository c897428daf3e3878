"""What a warm start saves when tokens come one at a time: evaluations a token from either initial guess.

Every token's search starts at zero, or at the equilibrium of the token before it. The equilibrium reached
is the same, so accuracies must be equal: that is checked. Run `make demo` first.

    python benchmarks/warm_start.py
    python benchmarks/warm_start.py --run DIR --length 256 --tolerances 0.05 1e-3 1e-5
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from common import describe_machine, finish, print_table
from torch import Tensor
from trained import load_word_problem

from deqseq import Residual
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.state_tracking.evaluate import held_out


@torch.no_grad()
def decode(model: ImplicitForCausalLM, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """Feed ``tokens`` (B, L) one by one; how they were solved and what they predicted."""
    cache, right, iterations, residual = None, [], [], []
    start = time.perf_counter()
    for t in range(tokens.shape[1]):
        out = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        right.append(out.logits[:, 0].argmax(-1) == targets[:, t])
        iterations.append(out.solution.iterations)
        residual.append(out.solution.residual)
    return {
        "accuracy": torch.stack(right).float().mean().item(),
        "evaluations a token": torch.cat(iterations).float().mean().item(),
        "residual": torch.cat(residual).mean().item(),
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="runs/demo/implicit-seed1", help="a trained run")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.05, 5e-3, 1e-3, 1e-5])
    parser.add_argument("--max-iter", type=int, default=2048, help="budget of a token")
    parser.add_argument("--output", default="runs/benchmarks/warm_start.json")
    options = parser.parse_args()

    try:
        model, settings = load_word_problem(options.run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fresh = held_out(settings, options.length, options.sequences, seed=0)
    rows: list[dict[str, Any]] = []
    equal = True
    for rtol in options.tolerances:
        policy = Residual(rtol=rtol, max_iter=options.max_iter)
        model.model.layer.set_convergence((policy, policy))
        for guess in ("zero", "previous"):
            model.config.initial_guess = guess
            found = decode(model, fresh.tokens, fresh.targets)
            rows.append({"tolerance": rtol, "initial guess": guess, **found})
        equal &= abs(rows[-1]["accuracy"] - rows[-2]["accuracy"]) <= 2e-3
    machine = describe_machine("cpu")
    print_table(f"{options.sequences} sequences of {settings.group}, {machine['device']}", rows)
    finish(options.output, {"settings": vars(options), "machine": machine, "rows": rows})
    if not equal:
        print("accuracy depends on the initial guess: more than one equilibrium, or too loose a tolerance")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
