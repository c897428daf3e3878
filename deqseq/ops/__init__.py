"""Operations: one folder each, plain PyTorch (naive.py) beside the fast forms."""
