"""Backbones: maps f(z, x) that compute all tokens in parallel.

A new backbone is a subclass of :class:`deqseq.Backbone`.
"""

from deqseq.backbones.folding import fold_weight_norm
from deqseq.backbones.llama import LlamaBackbone
from deqseq.backbones.mamba2 import Mamba2Backbone
from deqseq.backbones.mixer import MixerBackbone
from deqseq.backbones.module import ModuleBackbone
from deqseq.backbones.recursion import RecursionBackbone

__all__ = [
    "LlamaBackbone", "Mamba2Backbone", "MixerBackbone", "ModuleBackbone", "RecursionBackbone",
    "fold_weight_norm",
]  # fmt: skip
