"""Measures wavefront decoding: its speed, and how early its drafts are right.

Ordinary generation solves one token at a time. Wavefront decoding solves a window of tokens together. After
every evaluation, the model's choice after a token becomes the input of the next token. Until the token has
settled, this choice is a draft and may change.

The first table shows how often the choice after evaluation 1, 2, ... of a token is its final choice. The
second table compares ordinary generation with windows: passes (evaluations of f one after the other) per
token, tokens per second, and the share of equal tokens. Both decode greedily, one sequence at a time. Train a
model with `make pretrain-demo`.

    python benchmarks/wavefront.py runs/pretrain-demo/llama-tiny/model --text runs/pretrain-demo/help.txt
    python benchmarks/wavefront.py MODEL --text FILE --tokens 200 --windows 4 8 16 --rtol 1e-3
"""

from pathlib import Path
from typing import Any

import common
import torch
from common import Row
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from deqseq import ConvergencePolicy, Residual, SolveOptions
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.checks import check_count
from deqseq.policy import Judgement
from deqseq.tasks.common.runs import model_folder


class Recorder(ConvergencePolicy):
    """A policy that counts evaluations and records the model's choice after each. The prompt does not count.

    Attributes:
        passes: number of evaluations.
        drafts: for every token that is solved alone, the choices after evaluation 1, 2, ...
    """

    def __init__(self, policy: Residual, model: ImplicitForCausalLM, prompt: int) -> None:
        self.max_iter, self._policy, self._model, self._prompt = policy.max_iter, policy, model, prompt
        self.passes, self.drafts = 0, list[list[int]]()

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        if z.shape[1] != self._prompt:
            self.passes += 1
        if z.shape[1] == 1:
            if int(iterations) == 1:
                self.drafts.append([])
            self.drafts[-1].append(int(self._model.lm_head(fz).argmax(-1)))
        return self._policy.judge(z, fz, iterations, active)


def agreement(drafts: list[list[int]], most: int) -> list[float]:
    """The share of tokens whose choice after evaluation 1, 2, ..., ``most`` is their final choice."""
    return [sum(d[min(k, len(d) - 1)] == d[-1] for d in drafts) / len(drafts) for k in range(most)]


@torch.no_grad()
def main() -> None:
    made = common.parser(__doc__, "wavefront.json")
    made.add_argument("model", help="pretraining run, or folder of an implicit model with its tokenizer")
    made.add_argument("--text", required=True, help="text file; prompts begin at equal distances in it")
    add = made.add_argument
    add("--prompts", type=int, default=8, help="number of prompts (default: 8)")
    add("--prompt-tokens", type=int, default=24, help="tokens of a prompt (default: 24)")
    add("--tokens", type=int, default=100, help="new tokens after each prompt (default: 100)")
    add("--windows", type=int, nargs="+", default=[2, 4, 8, 16],
        help="numbers of tokens that are solved at once (default: 2 4 8 16)")  # fmt: skip
    add("--solver", default="picard", help="name of the solver (default: picard)")
    add("--rtol", type=float, default=1e-3, help="tolerance of the search (default: 1e-3)")
    add("--max-iter", type=int, default=256, help="maximum evaluations per token (default: 256)")
    options = made.parse_args()
    options.model = str(model_folder(options.model))
    check_count("--prompts", options.prompts)
    check_count("--prompt-tokens", options.prompt_tokens, least=2)
    check_count("--tokens", options.tokens, least=2)
    for window in options.windows:
        check_count("--windows", window)
        if options.prompt_tokens == (width := min(window, options.tokens - 1)):
            # Recorder tells passes of the prompt from others by their number of tokens.
            raise ValueError(f"--prompt-tokens must differ from {width}, the width of a window")
    if not Path(options.text).is_file():
        raise ValueError(f"the file {options.text} does not exist")
    text = Path(options.text).read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"])
    if len(ids) < options.prompts * options.prompt_tokens:
        raise ValueError(f"{options.text} has {len(ids)} tokens, fewer than the prompts need")
    model = ImplicitForCausalLM.from_pretrained(options.model).eval().to(options.device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    starts = range(0, len(ids) - options.prompt_tokens + 1, len(ids) // options.prompts)
    prompts = [ids[i : i + options.prompt_tokens][None].to(options.device) for i in starts][: options.prompts]
    policy = Residual(rtol=options.rtol, max_iter=options.max_iter)

    def decode(policy: ConvergencePolicy, name: str, **how: Any) -> Tensor:
        """The new tokens after each prompt, (prompts, tokens)."""
        fixed = {"solve": SolveOptions(options.solver, policy), "max_new_tokens": options.tokens}
        answers = [
            model.generate(prompt, do_sample=False, **fixed, **how)
            for prompt in tqdm(prompts, desc=name, leave=False)
        ]
        return torch.cat(answers)[:, options.prompt_tokens :]

    rows: list[Row] = []
    solved = options.prompts * (options.tokens - 1)  # the prompt's own passes choose the first new token
    shares: list[float] = []
    for window in (None, *options.windows):
        how = {} if window is None else {"wavefront": window}
        name = "generate" if window is None else f"wavefront={window}"
        recorder = Recorder(policy, model, options.prompt_tokens)
        found = decode(recorder, name, **how)
        if window is None:
            plain, shares = found, agreement(recorder.drafts, 12)
        seconds = common.stopwatch(lambda: decode(policy, name, **how), options.device)  # noqa: B023
        rows.append({
            "decoding": name,
            "passes a token": recorder.passes / solved, "tokens/s": plain.numel() / seconds,
            "times generate": plain.numel() / seconds / rows[0]["tokens/s"] if rows else 1.0,
            "equal tokens": (found == plain).float().mean().item(),
        })  # fmt: skip
    by_evaluation: Row = {str(k): share for k, share in enumerate(shares, 1)}
    common.print_table("share of tokens whose choice after an evaluation is final", [by_evaluation])
    setting = f"{plain.numel()} tokens, {options.solver}, tolerance {options.rtol:g}"
    common.print_table(f"\n{setting}, {common.machine_name(options.device)}", rows)
    common.write_results(options.output, options, agreement=shares, rows=rows)


if __name__ == "__main__":
    common.run(main)
