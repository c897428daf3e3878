"""State tracking in text: generated documents whose answers follow from many earlier sentences."""
