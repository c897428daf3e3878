"""The inner parts of the backbones, fused for GPUs; :mod:`deqseq.kernels` chooses among them."""
