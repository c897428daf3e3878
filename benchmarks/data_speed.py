"""How many tokens of state-tracking data are made per second: sampling and running products together.

The products are checked first. Each row is the median over repeated timings; 'best' is the fastest, on
which other work on the machine has the least influence.

    python benchmarks/data_speed.py
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import common
import torch

from deqseq.tasks.state_tracking.algebra import algebra, prefix_products
from deqseq.tasks.state_tracking.data import sample

CASES = [  # algebra, batch, length
    ("A5", 64, 16),
    ("A5", 64, 64),
    ("A5", 4096, 64),
    ("A5", 512, 256),
    ("A5xM", 64, 16),
    ("A5xM", 512, 256),
    ("S5", 512, 256),
]


def measure(name: str, batch: int, length: int, device: str, seconds: float) -> dict[str, Any]:
    """Check the targets of one case, then time it for ``seconds``."""
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
        timings.append(common.stopwatch(lambda: [draw() for _ in range(calls)], device) / calls)
    median = statistics.median(timings)
    speed = {"ms a batch": 1e3 * median, "Mtokens/s": batch * length / median / 1e6}
    case = {"algebra": name, "batch": batch, "length": length}
    return {**case, **speed, "best": batch * length / min(timings) / 1e6}


def main() -> None:
    made = common.parser(__doc__, "data_speed.json", device="cpu")
    made.add_argument("--seconds", type=float, default=2.0, help="time for each row (default: 2)")
    options = made.parse_args()
    rows = [measure(*case, device=options.device, seconds=options.seconds) for case in CASES]
    common.print_table(f"word problems on {common.machine_name(options.device)}", rows)
    common.write_results(options.output, options, rows=rows)


if __name__ == "__main__":
    common.run(main)
