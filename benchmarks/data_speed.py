"""Tokens a second of the state-tracking data, made on the fly: sampling plus running products.

Prints one table and writes the same numbers as JSON.
"""

import argparse
import json
import platform
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

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


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


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
        synchronize(device)
        before = perf_counter()
        for _ in range(calls):
            draw()
        synchronize(device)
        timings.append((perf_counter() - before) / calls)
    median = statistics.median(timings)
    return {
        "algebra": name,
        "batch": batch,
        "length": length,
        "ms_per_batch": 1e3 * median,
        "tokens_per_second": batch * length / median,
        "best_tokens_per_second": batch * length / min(timings),
        "timings": len(timings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(
            "Measure how fast state-tracking batches are made: random tokens of a group or monoid "
            "together with all their running products. Each line is the median over repeated "
            "timings; 'best' is the fastest, which other work on the machine disturbs least."
        )
    )
    parser.add_argument("--device", default="cpu", help="where to make them (default: cpu)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to spend on each line (default: 2)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/benchmarks/data_speed.json"),
        help="JSON file to write (default: runs/benchmarks/data_speed.json)",
    )
    arguments = parser.parse_args()

    print(f"{'algebra':8} {'batch':>6} {'length':>6} {'ms/batch':>9} {'Mtokens/s':>10} {'best':>6}")
    results = []
    for case in CASES:
        result = measure(*case, device=arguments.device, seconds=arguments.seconds)
        results.append(result)
        print(
            "{algebra:8} {batch:6} {length:6} {ms_per_batch:9.3f} ".format(**result)
            + f"{result['tokens_per_second'] / 1e6:10.1f} "
            + f"{result['best_tokens_per_second'] / 1e6:6.1f}"
        )
    report = {
        "device": arguments.device,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
