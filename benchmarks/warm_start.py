"""Counts evaluations of f per token with and without a warm start. Tokens are solved one at a time.

Without a warm start, the search for a token's equilibrium starts at zero. With a warm start, it starts at the
equilibrium of the previous token. Both starts should lead to the same equilibrium, so the script checks that
the accuracies agree. Run `make demo` first: it trains the model.

    python benchmarks/warm_start.py
    python benchmarks/warm_start.py --run DIR --length 256 --tolerances 0.05 1e-3 1e-5
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import common
import torch
from common import Row

from deqseq import Residual, SolveOptions
from deqseq.statistics import SolveStatistics

if TYPE_CHECKING:
    import trained


@torch.no_grad()
def decode(subject: trained.Subject, solve: SolveOptions) -> Row:
    """Feed the tokens to the model one by one. Returns accuracy, evaluations per token and residual."""
    cache, right, solves = None, [], SolveStatistics()
    for token, target in zip(subject.ids.split(1, dim=1), subject.targets.unbind(1), strict=True):
        out = subject.model(token, past_key_values=cache, use_cache=True, solve=solve)
        cache = out.past_key_values
        right.append(out.logits[:, 0].argmax(-1) == target)
        solves.add(out.solution)
    means, accuracy = solves.read(), torch.stack(right).float().mean().item()
    return {"accuracy": accuracy, "evaluations a token": means["iterations"], "residual": means["residual"]}


def main() -> int:
    made = common.parser(__doc__, "warm_start.json", device="cpu")
    made.add_argument("--run", default="runs/demo/implicit-seed1", help="folder of a trained run")
    made.add_argument("--length", type=int, default=64)
    made.add_argument("--sequences", type=int, default=32)
    made.add_argument("--tolerances", type=float, nargs="+", default=[0.05, 5e-3, 1e-3, 1e-5])
    made.add_argument("--max-iter", type=int, default=2048, help="maximum number of evaluations per token")
    options = made.parse_args()
    import trained

    subject = trained.load_word_problem(options.run, options.sequences, options.length, options.device)
    rows: list[Row] = []
    for rtol, guess in product(options.tolerances, ("zero", "previous")):
        policy = Residual(rtol=rtol, max_iter=options.max_iter)
        solve = replace(subject.model.model.layer.eval_solve, convergence=policy, guess=guess)
        row: Row = {"tolerance": rtol, "guess": guess}
        seconds = common.stopwatch(lambda: row.update(decode(subject, solve)), options.device)  # noqa: B023
        rows.append({**row, "seconds": seconds})
    common.report(f"{options.sequences} sequences of {subject.name}", options, rows)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    if any(abs(zero["accuracy"] - previous["accuracy"]) > 2e-3 for zero, previous in pairs):
        print("accuracy depends on the guess: several equilibria, or a tolerance that is too loose")
        return 1
    return 0


if __name__ == "__main__":
    common.run(main)
