"""State tracking: models predict running products in a finite group or monoid (the word problem)."""
