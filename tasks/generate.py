"""Continue a prompt: ``python -m deqseq.tasks.generate MODEL "prompt"``.

The text streams as it is made. ``--show-iterations`` colours every token by the number of evaluations it
took to settle, which is where an equilibrium model spends its work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import TextStreamer

from deqseq.solution import Status
from deqseq.tasks.evaluate.models import (
    implicit_layer,
    load_model,
    load_tokenizer,
    tolerance_and_budget,
)
from deqseq.tasks.figures import pyplot

# Cheap to dear, from the 256-colour table: green, yellow, orange, red.
SHADES = (34, 70, 106, 142, 178, 208, 196)


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    found = argparse.ArgumentParser(
        prog="python -m deqseq.tasks.generate",
        description="Continue a prompt with a language model, implicit or explicit.",
        epilog='Example: python -m deqseq.tasks.generate runs/model "Once upon a time" --show-iterations',
    )
    add = found.add_argument
    add("model", help="folder or hub name of a model with its tokenizer")
    add("prompt", nargs="?", help="text to continue; read from standard input if left out")
    add("--tokenizer", metavar="PATH", help="folder, hub name or tokenizer.json, if not with the model")
    add("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to add (default: 100)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest share P")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--rtol", type=float, metavar="R", help="relative tolerance, instead of the model's")
    add("--max-iter", type=int, metavar="N", help="iterations a token may take, instead of the model's")
    add(
        "--initial-guess",
        choices=("zero", "previous"),
        help="where a token's search starts: at zero, or at the equilibrium of the token before",
    )
    add(
        "--show-iterations",
        action="store_true",
        help="colour each token by its iterations, and sum them up below the text",
    )
    add("--plot", type=Path, metavar="PNG", help="draw iterations and residual of every token")
    add("--device", help="where to run, such as cpu (default: a GPU if there is one)")
    return found


class _Watch:
    """Keeps how every token was solved, and what it said; wraps the model's forward pass."""

    def __init__(self, model: Any) -> None:
        self.iterations: list[int] = []
        self.residual: list[float] = []
        self.status: list[int] = []
        model.register_forward_hook(self._see)

    def _see(self, module: Any, arguments: Any, output: Any) -> None:
        solution = output.solution
        for name in ("iterations", "residual", "status"):
            getattr(self, name).extend(getattr(solution, name)[0].tolist())


class _ColourStreamer(TextStreamer):
    """Streams tokens, each coloured by the iterations it took.

    The prompt's tokens are known when they are solved; a new token is solved in the call after the one
    that chose it, so it is printed one call later.
    """

    def __init__(self, tokenizer: Any, watch: _Watch, budget: int) -> None:
        super().__init__(tokenizer)
        self.watch = watch
        self.budget = budget
        self.tokens: list[int] = []
        self.printed = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens.extend(value.flatten().tolist())
        self._print(len(self.watch.iterations))

    def end(self) -> None:
        self._print(len(self.tokens))
        sys.stdout.write("\n")

    def _print(self, upto: int) -> None:
        while self.printed < min(upto, len(self.tokens)):
            # The text a token adds: some are only parts of a character.
            text = str(self.tokenizer.decode(self.tokens[: self.printed + 1]))
            before = str(self.tokenizer.decode(self.tokens[: self.printed]))
            added = text[len(before) :]
            if self.printed < len(self.watch.iterations):
                shade = shade_of(self.watch.iterations[self.printed], self.budget)
                added = f"\x1b[38;5;{shade}m{added}\x1b[0m"
            sys.stdout.write(added)
            self.printed += 1
        sys.stdout.flush()


def shade_of(iterations: int, budget: int) -> int:
    """The colour for a number of iterations, on a logarithmic scale up to the budget."""
    share = torch.log(torch.tensor(float(max(iterations, 1)))) / torch.log(
        torch.tensor(float(max(budget, 2)))
    )
    return SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)]


def generate(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError: what cannot be loaded; options that the model does not take.
    """
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    model: Any = load_model(arguments.model, arguments.device)
    tokenizer = load_tokenizer(arguments.model, arguments.tokenizer)
    layer = implicit_layer(model)
    asked = ("initial_guess", "show_iterations", "plot")
    if layer is None and any(getattr(arguments, name) for name in asked):
        raise ValueError(f"{arguments.model} is explicit: it has no iterations to set or to show")
    watch = None
    if layer is not None:
        policy = tolerance_and_budget(model, arguments.rtol, arguments.max_iter)
        if policy is not None:
            layer.set_convergence((layer.train_convergence, policy))
        if arguments.initial_guess:
            model.config.initial_guess = arguments.initial_guess
        watch = _Watch(model)
    tokens = tokenizer(prompt, return_tensors="pt").to(model.device)
    if tokens.input_ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens")
    streamer: Any = TextStreamer(tokenizer)
    if arguments.show_iterations and watch is not None and layer is not None:
        streamer = _ColourStreamer(tokenizer, watch, layer.eval_convergence.max_iter)
    torch.manual_seed(arguments.seed)
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p}
    model.generate(
        tokens.input_ids,
        attention_mask=tokens.attention_mask,
        max_new_tokens=arguments.max_new_tokens,
        streamer=streamer,
        **(sampling if arguments.temperature > 0 else {"do_sample": False}),
    )
    if watch is not None and arguments.show_iterations:
        print(summary(watch))
    if watch is not None and arguments.plot and plot(watch, arguments.plot):
        print(f"wrote {arguments.plot}", file=sys.stderr)


def summary(watch: _Watch) -> str:
    """One line on the work done."""
    count = len(watch.iterations)
    converged = sum(code == Status.CONVERGED for code in watch.status)
    return (
        f"{count} tokens solved; iterations a token: mean {sum(watch.iterations) / count:.1f}, "
        f"least {min(watch.iterations)}, most {max(watch.iterations)}; converged: {converged / count:.1%}"
    )


def plot(watch: _Watch, path: Path) -> bool:
    """Iterations and residual of every token, as a PNG; returns whether one was written."""
    plt = pyplot()
    if plt is None:
        return False
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    above.bar(range(len(watch.iterations)), watch.iterations)
    above.set_ylabel("iterations")
    below.semilogy(watch.residual, ".")
    below.set_ylabel("relative residual")
    below.set_xlabel("token")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    arguments = parser().parse_args(argv)
    for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_p", 1e-9)):
        if getattr(arguments, name) < least or (name == "top_p" and arguments.top_p > 1):
            parser().error(f"--{name.replace('_', '-')}: {getattr(arguments, name)} is out of range")
    try:
        generate(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
