"""Tokens a second of the state-tracking data, made on the fly: sampling and running products together.

The products are checked first. Each row is the median over repeated timings; 'best' is the fastest, which
other work on the machine disturbs least.

    python benchmarks/data_speed.py
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter
from typing import Any

import torch
from common import describe_machine, finish, print_table, stopwatch

from deqseq.tasks.state_tracking.algebra import algebra, prefix_products
from deqseq.tasks.state_tracking.data import sample

CASES = [
    ("A5", 64, 16),
    ("A5", 64, 64),
    ("A5", 4096, 64),
    ("A5", 512, 256),
    ("A5xM", 64, 16),
    ("A5xM", 512, 256),
    ("S5", 512, 256),
]


def measure(name: str, batch: int, length: int, device: str, seconds: float) -> dict[str, Any]:
    """Speed of one case, after checking that the targets are right."""
    generator = torch.Generator(device=device).manual_seed(0)
    chosen = algebra(name)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        return sample(chosen, batch, length, identity_probability=0.5, generator=generator)

    tokens, targets = draw()
    if not torch.equal(prefix_products(chosen, tokens.cpu()), targets.cpu()):
        raise RuntimeError(f"wrong targets for {name}")

    calls = max(1, 2**18 // (batch * length))  # a timing covers about as many tokens in all cases
    timings: list[float] = []
    end = perf_counter() + seconds
    while len(timings) < 3 or perf_counter() < end:
        timings.append(stopwatch(lambda: [draw() for _ in range(calls)], device) / calls)
    median = statistics.median(timings)
    return {
        "algebra": name,
        "batch": batch,
        "length": length,
        "ms a batch": 1e3 * median,
        "Mtokens/s": batch * length / median / 1e6,
        "best": batch * length / min(timings) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="where to make them (default: cpu)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row (default: 2)")
    parser.add_argument("--output", default="runs/benchmarks/data_speed.json", help="JSON file to write")
    options = parser.parse_args()
    rows = [measure(*case, device=options.device, seconds=options.seconds) for case in CASES]
    machine = describe_machine(options.device)
    print_table(f"word problems on {machine['device']}", rows)
    finish(options.output, {"settings": vars(options), "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
