"""Serves requests and measures time and evaluations, for ``serving.py``. Every arm runs in its own process.

Times are in seconds since serving began.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from deqseq import iteration
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.loop import Runner
from deqseq.solution import Solution

Row = dict[str, Any]
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the process of the arm
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of vLLM. They do not replace values that are already set."""


class Request(NamedTuple):
    """The time at which a request arrives, its prompt, and the number of new tokens to generate."""

    arrival: float
    prompt: list[int]
    new: int


class Answer(NamedTuple):
    """The tokens of a request, and the time at which each was ready."""

    tokens: list[int]
    times: list[float]


Serve = Callable[[Sequence[Request], Callable[[], Any]], list[Answer]]
"""Serves requests, and calls a function whenever a request has ended. Returns one answer per request."""


class Evaluations:
    """Counts the evaluations of f in this process. Padding does not count.

    An instance counts from its creation on. It wraps functions of deqseq's loop. This costs microseconds per
    evaluation.

    Attributes:
        counted: number of tokens in the batch, summed over all evaluations of f.
        needed: this sum, if every sequence left the batch as soon as its last token had converged.
        most: the largest number of evaluations that one token needed.
    """

    def __init__(self) -> None:
        self.reset()
        proceed, drive = Runner.proceed, iteration.drive

        def counting(runner: Runner) -> None:
            self.counted += int(runner.problem.sequence_lengths.sum())
            proceed(runner)

        def solve(runner: Runner) -> Solution:
            lengths = runner.problem.sequence_lengths
            solution = drive(runner)
            iterations = solution.iterations.amax(1)
            self.needed += int((iterations * lengths).sum())
            self.most = max(self.most, int(iterations.max()))
            return solution

        Runner.proceed, iteration.drive = counting, solve

    def reset(self) -> None:
        self.counted = self.needed = self.most = 0


def cpu_seconds() -> float:
    """User and system time of this process and all processes that it has started."""
    process = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in [process, *process.children(recursive=True)])


def quantiles(name: str, values: Sequence[float]) -> Row:
    """Median and 95th percentile of ``values``; ``None`` if there are no values."""
    if not values:
        return {f"{name}, median": None, f"{name}, 95 %": None}
    median, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.95]).double())
    return {f"{name}, median": median.item(), f"{name}, 95 %": high.item()}


def measure(serve: Serve, requests: Sequence[Request], batch: int, evaluations: Evaluations) -> Row:
    """Serve a few short requests to warm up, then serve and measure ``requests``."""
    short = [request._replace(arrival=0, new=min(8, request.new)) for request in requests[: 2 * batch]]
    serve(short, lambda: None)
    evaluations.reset()
    with tqdm(total=len(requests), unit="request", position=1, leave=False) as bar:
        cpu, start = cpu_seconds(), time.perf_counter()
        answers = serve(requests, bar.update)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    tokens = sum(len(answer.tokens) for answer in answers)
    first = [answer.times[0] - request.arrival for answer, request in zip(answers, requests, strict=True)]
    between = [b - a for answer in answers for a, b in pairwise(answer.times)]
    return {
        "tokens a CPU second": tokens / cpu, "tokens a second": tokens / seconds,
        "CPU seconds": cpu, "seconds": seconds, "threads": torch.get_num_threads(),
        **quantiles("seconds to the first token", first), **quantiles("seconds between tokens", between),
        "counted": evaluations.counted, "needed": evaluations.needed, "most": evaluations.most,
        "answers": [answer.tokens for answer in answers],
    }  # fmt: skip


class Clock(BaseStreamer):
    """Records the times at which ``generate`` has made a token for every sequence of its batch."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter() - self.start)

    def end(self) -> None:
        pass


def static(folder: str, requests: Sequence[Request], batch: int) -> Row:
    """Serve with ``ImplicitForCausalLM.generate``, in batches of ``batch`` requests in order of arrival.

    A batch starts when its last request has arrived and the batch before has ended. It ends when its longest
    request ends. Requests that want fewer tokens stay in the batch, and their further tokens are dropped.
    """
    evaluations = Evaluations()
    model: Any = ImplicitForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def serve(requests: Sequence[Request], ended: Callable[[], Any]) -> list[Answer]:
        start, answers = time.perf_counter(), []
        for group in (requests[i : i + batch] for i in range(0, len(requests), batch)):
            time.sleep(max(0, start + group[-1].arrival - time.perf_counter()))
            width, new = (max(sizes) for sizes in zip(*((len(r.prompt), r.new) for r in group), strict=True))
            ids, mask = torch.zeros(2, len(group), width, dtype=torch.int64)
            for row, request in enumerate(group):  # padding is on the left
                ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
                mask[row, width - len(request.prompt) :] = 1
            clock = Clock(start)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, streamer=clock
            )
            # Skip the first time of the clock: ``generate`` first passes the prompt to the streamer.
            for row, request in zip(out[:, width:], group, strict=True):
                answers.append(Answer(row[: request.new].tolist(), clock.times[1 : request.new + 1]))
                ended()
        return answers

    return measure(serve, requests, batch, evaluations)


def vllm(folder: str, requests: Sequence[Request], batch: int, eager: bool, **options: Any) -> Row:
    """Serve with vLLM, at most ``batch`` requests at a time.

    Args:
        eager: do not compile.
        options: further options of vLLM.
    """
    for name, value in VLLM.items():
        os.environ.setdefault(name, value)
    import vllm

    evaluations = Evaluations()
    length = max(len(request.prompt) + request.new for request in requests)
    engine = vllm.LLM(
        folder, skip_tokenizer_init=True, dtype="float32", max_model_len=length, seed=0,
        max_num_seqs=batch, enforce_eager=eager, enable_prefix_caching=False, **options,
    ).llm_engine  # fmt: skip

    def sampling(new: int) -> vllm.SamplingParams:
        return vllm.SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )  # fmt: skip

    def serve(requests: Sequence[Request], ended: Callable[[], Any]) -> list[Answer]:
        answers = {str(number): Answer([], []) for number in range(len(requests))}
        waiting, start = deque(zip(answers, requests, strict=True)), time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][1].arrival <= time.perf_counter() - start:
                name, request = waiting.popleft()
                engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling(request.new))
            if not engine.has_unfinished_requests():
                time.sleep(max(0, start + waiting[0][1].arrival - time.perf_counter()))
                continue
            outputs, now = engine.step(), time.perf_counter() - start
            for output in outputs:
                tokens = output.outputs[0].token_ids
                answers[output.request_id].tokens.extend(tokens)
                answers[output.request_id].times.extend([now] * len(tokens))
                if output.finished:
                    ended()
        return list(answers.values())

    return {"vllm": vllm.__version__, **measure(serve, requests, batch, evaluations)}
