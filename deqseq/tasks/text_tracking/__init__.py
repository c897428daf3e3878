"""State tracking in text: generated documents with answers that follow from many earlier sentences."""
