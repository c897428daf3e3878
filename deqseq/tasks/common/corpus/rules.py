"""Rules that drop files from a corpus: files that are too large, nearly empty, or probably generated."""

from dataclasses import dataclass
from math import inf

# Bytes that count as text: ASCII letters and digits, and every byte of a UTF-8 character outside ASCII.
_LETTERS = bytes(byte for byte in range(256) if byte >= 128 or chr(byte).isalnum())


@dataclass(frozen=True)
class Rules:
    """Limits for the text of a file. A file that violates one limit is dropped.

    Args:
        largest: maximum size of a file in bytes.
        shortest: minimum number of characters in a file.
        longest_line: maximum number of characters in a line.
        mean_line: maximum of the mean number of characters in a line.
        letters: minimum share of the file's bytes that are letters or digits, in [0, 1]. All bytes of
            characters outside ASCII count as letters.
    """

    largest: int
    shortest: int = 1
    longest_line: float = inf
    mean_line: float = inf
    letters: float = 0.0

    def broken_by(self, text: str) -> str | None:
        """The first rule that a file with this text breaks, in words; ``None`` if it breaks no rule.

        This method does not test the rule ``largest``, which is tested before a file is read.
        """
        if len(text) < self.shortest:
            return f"fewer than {self.shortest} characters" if self.shortest > 1 else "empty"
        lines = text.split("\n")
        if max(map(len, lines)) > self.longest_line:
            return f"a line of more than {self.longest_line:,} characters"
        if len(text) > self.mean_line * len(lines):
            return f"more than {self.mean_line} characters a line on average"
        data = text.encode()
        if len(data) - len(data.translate(None, _LETTERS)) < self.letters * len(data):
            return f"less than {self.letters:.0%} letters and digits"
        return None


RULES = {
    "code": Rules(largest=2**20, shortest=100, longest_line=1000, mean_line=100, letters=0.25),
    "none": Rules(largest=10 * 2**20),
}
"""The rules by name. ``"code"``: usual limits for source code, in which longer lines are mostly data or
minified code. ``"none"``: only empty files and very large files are dropped."""
