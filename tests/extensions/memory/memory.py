"""A backbone with a state: a linear recurrence."""

import torch
from torch import nn

from deqseq import Backbone, Context, State


class Memory(Backbone):
    """f(z, x)_t = tanh(h_t + x_t) with h_t = h_{t-1} / 2 + W z_t / 4 and h_0 = 1."""

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model
        self.linear = nn.Linear(d_model, d_model, bias=False)

    def prepare(self, x, position_ids=None):
        return Context((x,))

    def evaluate(self, z, context, state=None):
        u = self.linear(z) / 4
        h = torch.ones_like(u[:, 0]) if state is None else state.layers[0][0]
        trace = []
        for t in range(u.shape[1]):
            h = h / 2 + u[:, t]
            trace.append(h)
        trace = torch.stack(trace, 1)  # (B, W, D)
        return torch.tanh(trace + context.tokens[0]), trace

    def initial_state(self, batch_size, device=None, dtype=None):
        h = torch.ones(batch_size, self.d_model, device=device, dtype=dtype)
        return State(torch.zeros(batch_size, dtype=torch.int64, device=device), ((h,),))

    def advance(self, trace, state, count):
        (h,) = state.layers[0]
        past = torch.cat([h[:, None], trace], 1)  # h before each token, and h after the last token
        h = past[torch.arange(len(count), device=count.device), count]
        return State(state.seen + count, ((h,),))
