"""Small worlds that change step by step, and the text about them: programs, boxes and cards.

A world has a value at each of its places. The text states all values once. Then *operations* change the
world, and *answers* say the value of a place. Between an answer and the last statement about its place, at
least one operation has acted on this place. So a reader must follow the operations.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from deqseq.checks import check_count

FEWEST_PLACES, MOST_PLACES = 3, 8


@dataclass(frozen=True)
class Answer:
    """A word of a document that follows from the words before it.

    Attributes:
        at: index of the word in the document.
        operations: number of operations since the text last stated this value. The value may have been at
            another place then. In boxes, number of operations since the text last stated the box of the
            thing. In a loop, every repetition of an operation counts.
        last_stated: the value that the text last stated for the place of the answer. A reader who ignores
            operations may give this answer.
        last_mentioned: the value that the text mentioned last, for any place.
    """

    at: int
    operations: int
    last_stated: str
    last_mentioned: str


class World(ABC):
    """An unfinished document, and the state of the world that it describes.

    Attributes:
        words: the words so far.
        answers: the answers among the words.

    Args:
        places: number of places, 3 to 8.
        random: source of all random choices.

    Raises:
        ValueError: the number of places is out of range.
    """

    VOCABULARY: ClassVar[Sequence[str]]
    """All words that may occur."""
    END: ClassVar[str]
    """The word that ends a sentence. Alone, it is an empty sentence."""
    START: ClassVar[int]
    """Number of words that state the value of one place at the start of the document."""
    LONGEST: ClassVar[int]
    """Number of words in the longest operation."""
    SHORTEST: ClassVar[int]
    """Number of words in the shortest operation."""
    QUESTION: ClassVar[int]
    """Number of words in a sentence that asks for a value and answers."""

    def __init__(self, places: int, random: Random) -> None:
        check_places(places)
        self.places, self.random = places, random
        self.words: list[str] = []
        self.answers: list[Answer] = []
        self._done = 0  # operations carried out
        self._mentioned = ""
        self._values = [""] * places
        self._since = [0] * places  # ``_done`` when the text last stated the value that is now at this place
        self._stated = [""] * places  # the value that the text last stated for this place
        self._changed: set[int] = set()  # places on which operations acted after the text stated their value

    @classmethod
    def shortest_document(cls, places: int) -> int:
        """A number of words that is enough for the start, the longest operation and one answer."""
        return cls.START * places + 2 + cls.LONGEST + cls.QUESTION

    def write(self, words: int, longest_run: int | None) -> None:
        """Write a document of exactly ``words`` words.

        Between two answers is a run of operations. The number of operations in a run is log-uniform between 1
        and the number that still fits into the document, but at most ``longest_run``. When no further
        operation fits, answers and empty sentences fill the rest.

        Args:
            longest_run: 1 asks after every operation. ``None`` sets no limit, so the longest dependences grow
                with the document. Two things make a run longer than this: a run goes on until an operation
                has changed a place, and a loop is never cut.
        """
        self._start()
        while self._room(words) >= self.QUESTION:
            longest = max(1, (self._room(words) - self.QUESTION) // self.SHORTEST)
            if longest_run is not None:
                longest = min(longest, longest_run)
            wanted = round(math.exp(self.random.uniform(0, math.log(longest))))
            begun = self._done
            while self._room(words) >= self.LONGEST + self.QUESTION and (
                self._done - begun < wanted or not self._changed
            ):
                self._operate()
            if not self._changed:
                break
            self._ask(self._one_of_changed())
        self._say(*[self.END] * self._room(words))

    @abstractmethod
    def _start(self) -> None:
        """State the values of all places."""

    @abstractmethod
    def _operate(self) -> None:
        """Write a random operation and carry it out."""

    @abstractmethod
    def _ask(self, place: int) -> None:
        """Write a sentence with the value of ``place``. Call :meth:`_answer` to write the value."""

    def _room(self, words: int) -> int:
        return words - len(self.words)

    def _say(self, *words: str) -> None:
        self.words += words

    def _one_of_changed(self) -> int:
        return self.random.choice(sorted(self._changed))

    def _state(self, place: int, value: str) -> None:
        """Set the value of ``place``, which the text states now."""
        self._values[place] = self._stated[place] = self._mentioned = value
        self._since[place] = self._done
        self._changed.discard(place)

    def _answer(self, place: int) -> None:
        """Write the value of ``place`` and mark it as an answer."""
        passed = self._done - self._since[place]
        self.answers.append(Answer(len(self.words), passed, self._stated[place], self._mentioned))
        self._say(self._values[place])
        self._state(place, self._values[place])

    def _rearrange(self, sources: Sequence[int]) -> None:
        """Carry out an operation: place i gets the value of place ``sources[i]``."""
        self._values = [self._values[source] for source in sources]
        self._since = [self._since[source] for source in sources]
        self._changed |= {place for place, source in enumerate(sources) if place != source}
        self._done += 1

    def _two(self) -> tuple[int, int]:
        """Two different places."""
        first, second = self.random.sample(range(self.places), 2)
        return first, second


class Programs(World):
    """Programs with assignments, swaps and loops over variables that hold digits.

    ``a = 3 ; b = 1 ; c = 7 ; swap a b ; repeat 2 : swap b c ; a = b ; end ; print a -> 3 ;``
    """

    NAMES = tuple("abcdefgh")
    DIGITS = tuple("0123456789")
    VOCABULARY = (*NAMES, *DIGITS, "=", ";", ":", "->", "swap", "repeat", "end", "print")
    END, START, SHORTEST, LONGEST, QUESTION = ";", 4, 4, 13, 5

    def _start(self) -> None:
        for place, value in enumerate(self.random.sample(self.DIGITS, self.places)):
            self._assign(place, value)

    def _operate(self) -> None:
        kind = self.random.random()
        if kind < 0.12:
            self._done += 1
            self._assign(self.random.randrange(self.places), self.random.choice(self.DIGITS))
        elif kind < 0.85:
            name, sources = self._step()
            self._say(*name)
            self._rearrange(sources)
        else:
            self._loop()

    def _assign(self, place: int, value: str) -> None:
        self._say(self.NAMES[place], "=", value, self.END)
        self._state(place, value)

    def _loop(self) -> None:
        times, body = self.random.choice((2, 3)), [self._step(), self._step()]
        self._say("repeat", str(times), ":")
        self._mentioned = str(times)
        for words, _ in body:
            self._say(*words)
        self._say("end", self.END)
        for _ in range(times):
            for _, sources in body:
                self._rearrange(sources)

    def _step(self) -> tuple[list[str], list[int]]:
        """A swap or, less often, a copy. Returns its words, and the sources for :meth:`_rearrange`."""
        first, second = self._two()
        sources = list(range(self.places))
        sources[first] = second
        if self.random.random() < 0.08:
            return [self.NAMES[first], "=", self.NAMES[second], self.END], sources
        sources[second] = first
        return ["swap", self.NAMES[first], self.NAMES[second], self.END], sources

    def _ask(self, place: int) -> None:
        self._say("print", self.NAMES[place], "->")
        self._answer(place)
        self._say(self.END)


class Boxes(World):
    """Things in boxes. The places are the things; the value of a thing is the number of its box.

    ``put the key in box 2 . put the cup in box 1 . swap box 1 and box 2 . move the cup from box 2 to box 3 .
    the key is in box 1 .``

    The number after ``from`` is an answer too: it follows from the words before it.
    """

    THINGS = ("key", "coin", "ring", "cup", "book", "ball", "pen", "map")
    NUMBERS = tuple("12345678")
    VOCABULARY = (
        *THINGS, *NUMBERS, ".", "put", "the", "in", "box", "swap", "and", "move", "from", "to", "is",
    )  # fmt: skip
    END, START, SHORTEST, LONGEST, QUESTION = ".", 7, 7, 10, 7

    def _start(self) -> None:
        for thing in range(self.places):
            self._say("put", "the", self.THINGS[thing], "in", "box")
            self._put(thing, self.random.choice(self.NUMBERS[: self.places]))

    def _operate(self) -> None:
        if self._changed and self.random.random() < 0.15:
            thing = self._one_of_changed()
            self._say("move", "the", self.THINGS[thing], "from", "box")
            self._answer(thing)
            self._say("to", "box")
            self._done += 1
            others = [n for n in self.NUMBERS[: self.places] if n != self._values[thing]]
            self._put(thing, self.random.choice(others))
            return
        first, second = (self.NUMBERS[place] for place in self._two())
        self._say("swap", "box", first, "and", "box", second, self.END)
        other = {first: second, second: first}
        self._changed |= {thing for thing, box in enumerate(self._values) if box in other}
        self._values = [other.get(box, box) for box in self._values]
        self._mentioned = second
        self._done += 1

    def _put(self, thing: int, box: str) -> None:
        self._say(box, self.END)
        self._state(thing, box)

    def _ask(self, place: int) -> None:
        self._say("the", self.THINGS[place], "is", "in", "box")
        self._answer(place)
        self._say(self.END)


class Cards(World):
    """A row of cards. ``swap`` exchanges the first two, ``rotate`` moves the first to the end.

    ``lay king queen ace ; swap ; rotate ; reverse ; second -> ace ;``

    These three operations generate all permutations of the row, and they do not commute.
    """

    CARDS = ("ace", "king", "queen", "jack", "ten", "nine", "eight", "seven")
    PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    VOCABULARY = (*CARDS, *PLACES, ";", "->", "lay", "swap", "rotate", "reverse")
    END, START, SHORTEST, LONGEST, QUESTION = ";", 1, 2, 2, 4

    def _start(self) -> None:
        self._say("lay")
        for place, card in enumerate(self.random.sample(self.CARDS[: self.places], self.places)):
            self._say(card)
            self._state(place, card)
        self._say(self.END)

    def _operate(self) -> None:
        row = list(range(self.places))
        operations = {"swap": [1, 0, *row[2:]], "rotate": [*row[1:], 0], "reverse": row[::-1]}
        name = self.random.choice(list(operations))
        self._say(name, self.END)
        self._rearrange(operations[name])

    def _ask(self, place: int) -> None:
        self._say(self.PLACES[place], "->")
        self._answer(place)
        self._say(self.END)


WORLDS: dict[str, type[World]] = {"programs": Programs, "boxes": Boxes, "cards": Cards}


def check_places(places: int) -> None:
    """Raise ``ValueError`` if a world cannot have this number of places."""
    check_count("places", places, FEWEST_PLACES, MOST_PLACES)
