"""Operations of the backbones and the loop, one folder each.

Each folder's ``__init__.py`` has the function to call. The function has several implementations:

- The plain one uses only PyTorch and runs on every device. It is in the folder's ``__init__.py`` or
  ``naive.py``. Tests compare all others with it. Only ``one_token`` has no plain implementation.
- Fast ones are in ``triton.py`` (our own kernels) and in files named after the package that they call, such
  as ``fla.py``.

:mod:`deqseq.kernels` selects the implementation.

=================  ======================================================================
``add_norm``       residual addition and RMSNorm
``fan_out``        one tensor for many readers; sums their gradients
``mixer``          the Mamba2 mixer: projections, convolution, recurrence, gated norm
``one_token``      whole blocks applied to one token per sequence (decoding), in Triton
``advance``        updating a backbone's state with new tokens
``residual``       norms of f(z) - z, and which tokens converge, settle and freeze
``cross_entropy``  the loss of a language model
=================  ======================================================================
"""
