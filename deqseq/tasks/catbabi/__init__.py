"""CatbAbI: the twenty bAbI tasks as one stream of stories (Schlag et al., 2021, arXiv 2011.07831)."""
