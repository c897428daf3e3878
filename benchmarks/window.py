"""What the window saves: evaluations per token and passes for every window, on a trained model.

The fixed point is the same for every window, so accuracies must be equal: that is checked first. With no
window every token is iterated while the tokens before it still move; in a small window few are. Run
`make demo` first.

    python benchmarks/window.py
    python benchmarks/window.py --run DIR --lengths 64 256 1024 --windows all 32 8 1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import describe_machine, finish, print_table

from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate, held_out, load


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="runs/demo/implicit-seed1", help="a trained run")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--windows", nargs="+", default=["all", "64", "16", "8", "4", "1"])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tolerance", type=float, help="relative residual (default: the model's)")
    parser.add_argument("--max-iter", type=int, default=2048, help="budget of a token")
    parser.add_argument("--output", default="runs/benchmarks/window.json")
    options = parser.parse_args()

    try:
        model, settings = load(options.run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    equal = True
    for length in options.lengths:
        fresh = held_out(settings, length, options.sequences, seed=0)
        found: list[tuple[str, Evaluation]] = []
        for name in options.windows:
            window = None if name == "all" else int(name)
            result = evaluate(model, fresh.tokens, fresh.targets, window, options.tolerance, options.max_iter)
            found.append((name, result))
        first = found[0][1]
        assert first.iterations is not None
        equal &= all(abs(e.accuracy - first.accuracy) <= 2e-3 for _, e in found)
        for name, e in found:
            assert e.iterations is not None
            rows.append(
                {
                    "length": length,
                    "window": name,
                    "accuracy": e.accuracy,
                    "accuracy last 10": e.accuracy_last10,
                    "evaluations a token": e.iterations,
                    "of no window": e.iterations / first.iterations,
                    "passes": e.passes,
                    "residual": e.residual,
                    "converged": e.converged,
                    "seconds": e.seconds,
                }
            )
    machine = describe_machine("cpu")
    print_table(f"{options.sequences} sequences of {settings.group}, {machine['device']}", rows)
    finish(options.output, {"settings": vars(options), "machine": machine, "rows": rows})
    _plot(rows, Path(options.output).with_suffix(".png"))
    if not equal:
        print("the windows' accuracies differ by more than 0.002: raise --max-iter", file=sys.stderr)
    return 0 if equal else 1


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for length in dict.fromkeys(row["length"] for row in rows):
        mine = [row for row in rows if row["length"] == length]
        windows = [row["window"] for row in mine]
        left.plot(windows, [row["evaluations a token"] for row in mine], "o-", label=f"L = {length}")
        right.plot(windows, [row["passes"] for row in mine], "o-", label=f"L = {length}")
    left.set(xlabel="window", ylabel="evaluations a token")
    right.set(xlabel="window", ylabel="passes", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
