"""Operations of the backbones and the loop: a folder each.

Callers use the function in ``__init__.py``. It contains the plain PyTorch form, or calls the one in
``naive.py``; this form runs anywhere and is the oracle of the tests. The fast forms are beside it:
``triton.py``, and one file for every package that has the operation. The backbones' operations take the
form's name from :func:`deqseq.kernels.choose`, the loop's ask :func:`deqseq.kernels.fused`.

=================  ======================================================================
``add_norm``       residual addition and RMSNorm
``mixer``          the Mamba2 mixer: projections, convolution, recurrence, gated norm
``one_token``      whole blocks at one token a sequence (decoding); Triton only
``advance``        moving a state past the tokens that it consumes
``residual``       norms of f(z) - z; which tokens converge, settle and freeze
``cross_entropy``  the loss of a language model
=================  ======================================================================
"""
