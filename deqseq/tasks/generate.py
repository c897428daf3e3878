"""Continue a prompt: ``python -m deqseq.tasks.generate MODEL "prompt"``."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from deqseq.checks import LEAST_TEMPERATURE
from deqseq.guess import guesses
from deqseq.status import Status
from deqseq.tasks.common import command_line
from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.common.settings import NonNegativeFinite, PositiveFinite, PositiveInt, Seed

# ANSI 256-colour codes, from few to many iterations: green, yellow, orange, red.
SHADES = (34, 70, 106, 142, 178, 208, 196)
# Largest number of tokens for which the figure's axis shows the text of every token.
_FEW = 64

Show = Callable[[str, int | None], str]
"""A function that formats a token for printing, from its text and its number of iterations.

The number is ``None`` if the token was not solved.
"""


class _Watch:
    """A forward hook that records how every token was solved."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.residual: list[float] = []
        self.status: list[int] = []

    def __call__(self, module: Any, arguments: Any, output: Any) -> None:
        for name, values in vars(self).items():
            values += getattr(output.solution, name)[0].tolist()


class _SolvedStreamer:
    """Prints each token of the prompt and of the continuation with its number of iterations.

    A call of the model generates a token, but does not solve it. The next call has this token as its input
    and solves it. Only then is its number of iterations known. So each token is printed one call after it was
    generated.
    """

    def __init__(self, tokenizer: Any, watch: _Watch, show: Show) -> None:
        self.tokenizer, self.watch, self.show = tokenizer, watch, show
        self.tokens: list[int] = []
        self.printed = 0
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt (1, L) or the next token (1,). Prints solved tokens that are not printed yet."""
        self.tokens.extend(value.flatten().tolist())
        for iterations in self.watch.iterations[self.printed : len(self.tokens)]:
            self._print(iterations)

    def end(self) -> None:
        """Print the last token. It is not solved, because the model never gets it as an input."""
        while self.printed < len(self.tokens):
            self._print(None)
        sys.stdout.write("\n")

    def _print(self, iterations: int | None) -> None:
        self.printed += 1
        text = str(self.tokenizer.decode(self.tokens[: self.printed]))
        added = ""
        if not text.endswith("\ufffd"):  # print a character only when it is complete
            added, self.text = text[len(self.text) :], text
        sys.stdout.write(self.show(added, iterations))
        sys.stdout.flush()


def in_colour(text: str, iterations: int | None, budget: int) -> str:
    """Colour ``text`` by its number of iterations. Marks line breaks with ⏎, to show their colour."""
    if iterations is None:
        return text
    return _shaded(text.replace("\n", "⏎\n"), shade_of(iterations, budget))


def in_lines(text: str, iterations: int | None) -> str:
    """Format a token as one line: its number of iterations, then its text in quotes."""
    return f"{'-' if iterations is None else iterations:>10}  {text!r}\n"


def shade_of(iterations: int, budget: int) -> int:
    """The colour for a number of iterations, on a logarithmic scale up to the budget."""
    share = math.log(max(iterations, 1)) / math.log(max(budget, 2))
    return SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)]


def legend(budget: int) -> str:
    """One line with every shade and its range of iterations."""
    parts = []
    for shade, group in groupby(range(1, budget + 1), lambda n: shade_of(n, budget)):
        first, *rest = group
        parts.append(_shaded(f"{first}-{rest[-1]}" if rest else str(first), shade))
    return "iterations: " + " ".join(parts)


def _shaded(text: str, shade: int) -> str:
    return f"\x1b[38;5;{shade}m{text}\x1b[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    about = (
        "Continue a prompt with a language model, implicit or explicit.\n\n"
        '  python -m deqseq.tasks.generate runs/llama-tiny "Once upon a time" --show-iterations'
    )
    return command_line.main(
        "python -m deqseq.tasks.generate", about, {}, arguments, default=generate, interrupted="no more text"
    )


def generate(
    model: str,
    prompt: str | None = None,
    *,
    tokenizer: str | None = None,
    max_new_tokens: PositiveInt = 100,
    temperature: NonNegativeFinite = 0.0,
    top_p: float | None = None,
    seed: Seed = 0,
    rtol: PositiveFinite | None = None,
    max_iter: PositiveInt | None = None,
    guess: str | None = None,
    show_iterations: bool = False,
    plot: Path | None = None,
    device: str | None = None,
) -> None:
    """Continue a prompt and print the text while it is generated.

    Args:
        model: folder of a model or of a pretraining run, or name of a model on the hub
        prompt: text to continue; read from standard input if left out
        tokenizer: tokenizer.json, folder or hub name; the model's by default
        max_new_tokens: maximum number of tokens to generate
        temperature: sample at this temperature, at least 1e-30; 0 takes the likeliest token
        top_p: sample only from the most likely tokens whose probabilities add up to top_p; from all tokens by
            default
        seed: seed of the sampling
        rtol: stop the search of a token at this relative residual; the model's by default. A smaller value
            may need a larger max_iter
        max_iter: maximum number of iterations per token; the model's by default
        guess: where a token's search starts: zero, previous (the previous token's equilibrium), noise, or a
            registered name; the model's by default
        show_iterations: colour each token by its iterations and print a summary below the text. If the
            output is not a terminal or NO_COLOR is set, print a line with the iterations of each token
            instead of colours
        plot: PNG file for a figure of every token's iterations and residual
        device: device to run on, such as cpu; by default a GPU if there is one
    """
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"--temperature must be 0 or at least {LEAST_TEMPERATURE}, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {top_p}")
    if top_p is not None and temperature == 0:
        raise ValueError("--top-p is for sampling only: also give a --temperature above 0")
    if plot is not None:
        command_line.check_png("--plot", plot)
    # Import transformers only now, after the arguments are checked, because the import takes seconds.
    from transformers.generation.streamers import TextStreamer

    from deqseq.tasks.common import models
    from deqseq.tasks.common.tokenizer import load_for_model

    # Remove the line break that `echo PROMPT |` adds to a piped prompt.
    prompt = sys.stdin.read().removesuffix("\n") if prompt is None else prompt
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt must be UTF-8: {error.reason} at character {error.start}") from error
    network: Any = models.load_model(model, device)
    vocabulary = load_for_model(model, tokenizer)
    solve = models.solve_options(network, rtol=rtol, max_iter=max_iter)
    if solve is None and (guess or show_iterations or plot):
        raise ValueError(f"{model} is explicit: it has no iterations to set or to show")
    tokens = vocabulary(prompt, return_tensors="pt").to(network.device)
    if tokens.input_ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens")
    models.check_tokens(network, tokens.input_ids)
    watch: Any = None
    streamer: Any = TextStreamer(vocabulary)
    if solve is not None:
        if guess:
            solve = replace(solve, guess=guesses.create(guess))
        watch = _Watch()
        network.register_forward_hook(watch)
        budget = solve.convergence.max_iter
        if show_iterations:
            coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            show: Show = partial(in_colour, budget=budget) if coloured else in_lines
            print(legend(budget) if coloured else "iterations  token")
            streamer = _SolvedStreamer(vocabulary, watch, show)
    torch.manual_seed(seed)
    options: dict[str, Any] = {} if solve is None else {"solve": solve}
    if temperature > 0:  # top_k=0 allows all tokens; the default allows only the 50 likeliest
        options |= {"temperature": temperature, "top_p": top_p or 1.0, "top_k": 0}
    found = network.generate(
        tokens.input_ids, attention_mask=tokens.attention_mask, max_new_tokens=max_new_tokens,
        streamer=streamer, do_sample=temperature > 0, **options,
    )  # fmt: skip
    if show_iterations:
        print(summary(watch))
    if plot:
        texts = [str(vocabulary.decode([token])) for token in found[0].tolist()]
        drawn = draw(watch, texts, tokens.input_ids.shape[1], budget, plot)
        print(f"wrote {plot}" if drawn else "no figure was drawn", file=sys.stderr)


def summary(watch: _Watch) -> str:
    """One line with the number of solved tokens, the iterations per token, and the share that converged."""
    count = len(watch.iterations)
    converged = sum(code == Status.CONVERGED for code in watch.status)
    return (
        f"{count} tokens solved (all except the last); iterations per token: mean "
        f"{sum(watch.iterations) / count:.1f}, least {min(watch.iterations)}, most {max(watch.iterations)}; "
        f"converged: {converged / count:.1%}"
    )


def draw(watch: _Watch, texts: Sequence[str], prompt: int, budget: int, path: Path) -> bool:
    """Draw the iterations and the residual of every token. Returns whether the PNG file was written.

    Args:
        texts: the text of each token. The axis shows the texts if there are few tokens.
        prompt: number of tokens of the prompt.
        budget: maximum number of iterations per token.
        path: the PNG file.
    """

    def drawn(axes: list[Any]) -> None:
        above, below = axes
        place = range(len(watch.iterations))
        above.bar(place, watch.iterations)
        above.axhline(budget, color="grey", linestyle="--", label=f"most allowed: {budget}")
        above.set_ylabel("iterations")
        below.plot(place, watch.residual, ".")
        below.set_ylabel("relative residual")
        log_scale(above.yaxis, 2)
        log_scale(below.yaxis)
        above.set_ylim(bottom=0.8)  # start below 1, so that one iteration is a visible bar
        for axis in axes:
            axis.axvline(prompt - 0.5, color="black", linestyle=":", label="end of the prompt")
        above.legend()
        if len(place) <= _FEW:
            labels = [text.replace("\n", "⏎") for text in texts[: len(place)]]
            below.set_xticks(place, labels, rotation=90, fontsize="small", parse_math=False)
        else:
            below.set_xlabel("token")

    return save_figure(path, drawn, 2, size=(9, 5), sharex=True)


if __name__ == "__main__":
    sys.exit(main())
