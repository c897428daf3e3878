"""Operations of the backbones and the loop, one folder each.

Callers use the function in ``__init__.py``. The plain PyTorch form is in this file or in ``naive.py``. The
plain form runs anywhere, and tests compare the fast forms with it. The fast forms are in ``triton.py`` and
in one file per package that has the operation. :func:`deqseq.kernels.choose` selects the form of the
backbones' operations; :func:`deqseq.kernels.fused` selects the form of the loop's operations.

=================  ======================================================================
``add_norm``       residual addition and RMSNorm
``mixer``          the Mamba2 mixer: projections, convolution, recurrence, gated norm
``one_token``      whole blocks for one token per sequence (decoding); Triton only
``advance``        updating a state with the tokens that it consumes
``residual``       norms of f(z) - z; which tokens converge, settle and freeze
``cross_entropy``  the loss of a language model
=================  ======================================================================
"""
