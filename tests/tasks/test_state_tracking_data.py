"""Algebras and word problems: laws, frequencies of tokens, determinism, CSV files, errors."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from deqseq.tasks.common.seeds import batch_seed
from deqseq.tasks.state_tracking.algebra import Algebra, algebra, prefix_products
from deqseq.tasks.state_tracking.data import (
    WordProblems,
    WordProblemStream,
    algebra_of_csv,
    generate,
    read_csv,
    sample,
    write_csv,
)

GROUPS = ["Z2", "Z7", "Z60", "S2", "S3", "S5", "A3", "A4", "A5", "A4xZ5", "Z2xS3xZ2"]
MONOIDS = ["M", "A5xM", "MxZ3", "Z2xMxZ3", "MxM"]

GOLDEN_CSV = """\
seed,input,target
7,1 2 3 4 5 59,1 0 3 2 11 16
7,59 1 0 58 20 33,59 58 58 25 9 15
"""


def random_tokens(name: str, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randint(len(algebra(name)), (batch, length), generator=generator)


def slow_prefix_products(chosen: Algebra, tokens: torch.Tensor) -> torch.Tensor:
    """Prefix products by definition, one element at a time."""
    table = chosen.table.tolist()
    rows = []
    for row in tokens.tolist():
        products = row[:1]
        for token in row[1:]:
            products.append(table[products[-1]][token])
        rows.append(products)
    return torch.tensor(rows)


class TestAlgebra:
    @pytest.mark.parametrize("name", GROUPS + MONOIDS)
    def test_laws(self, name: str) -> None:
        chosen = algebra(name)
        table, every = chosen.table, torch.arange(len(chosen))
        assert table.dtype == torch.int64 and 0 <= int(table.min()) <= int(table.max()) < len(chosen)
        assert torch.equal(table[chosen.identity], every) and torch.equal(table[:, chosen.identity], every)
        for middle in every:  # associativity: (a·m)·b = a·(m·b) for all a and b
            assert torch.equal(table[table[:, middle]], table[:, table[middle]])
        assert len(set(chosen.elements)) == len(chosen)
        assert chosen.is_group == (name in GROUPS)

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            ("Z60", 60),
            ("S5", 120),
            ("A5", 60),
            ("M", 4),
            ("A4xZ5", 60),
            ("A5xM", 240),
            ("A7", 2520),
        ],
    )
    def test_size(self, name: str, size: int) -> None:
        assert len(algebra(name)) == size

    @pytest.mark.parametrize("name", ["S4", "A5"])
    def test_permutations_multiply_right_factor_first(self, name: str) -> None:
        chosen = algebra(name)
        assert list(chosen.elements) == sorted(chosen.elements)
        for a, b in product(range(len(chosen)), repeat=2):
            left, right = chosen.elements[a], chosen.elements[b]
            composed = tuple(left[i] for i in right)
            assert chosen.elements[int(chosen.table[a, b])] == composed

    def test_aperiodic_monoid(self) -> None:
        chosen = algebra("M")
        spelled = ["".join(chosen.elements[i] for i in row) for row in chosen.table.tolist()]
        assert spelled == ["EABX", "AXXX", "BABX", "XXXX"]

    def test_product_is_left_major_and_componentwise(self) -> None:
        chosen, left, right = algebra("Z2xMxZ3"), algebra("Z2xM"), algebra("Z3")
        assert [factor.name for factor in chosen.factors] == ["Z2", "M", "Z3"]
        assert [factor.is_group for factor in chosen.factors] == [True, False, True]
        assert chosen.elements[:4] == ((0, "E", 0), (0, "E", 1), (0, "E", 2), (0, "A", 0))
        a, b = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
        expected = left.table[a // 3, b // 3] * 3 + right.table[a % 3, b % 3]
        assert torch.equal(chosen.table, expected)

    def test_spellings_share_one_object_per_name(self) -> None:
        assert algebra("A4_x_Z5") is algebra("A4xZ5")

    @pytest.mark.parametrize("name", GROUPS + MONOIDS)
    def test_parts_compose_every_element_once(self, name: str) -> None:
        chosen = algebra(name)
        group, monoid = chosen.parts
        together = group[:, None] + monoid - chosen.identity
        assert torch.equal(together.flatten().sort().values, torch.arange(len(chosen)))
        assert torch.equal(chosen.table[group[:, None], monoid], together)
        assert torch.equal(chosen.table[monoid, group[:, None]], together)
        assert (len(monoid) == 1) == chosen.is_group

    @pytest.mark.parametrize("name", ["Z7", "S3", "A5", "M", "A5xM", "MxZ3", "MxM"])
    def test_chance_is_that_of_where_long_products_end(self, name: str) -> None:
        ends = prefix_products(algebra(name), random_tokens(name, 4000, 100))[:, -1]
        assert algebra(name).chance == 1 / len(ends.unique())

    @pytest.mark.parametrize(
        "name", ["", "A5x", "xM", "Q8", "Z0", "Z1", "S1", "A2", "a5", "Z05", "A5 x M", "M4", "A5*M"]
    )
    def test_unknown_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"unknown algebra .*must be one of"):
            algebra(name)

    @pytest.mark.parametrize("name", ["S8", "A8", "S500", "Z5041", "S5xA5", "Z9999"])
    def test_too_large(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}.* too large.*5040"):
            algebra(name)


class TestPrefixProducts:
    def test_poster_example(self) -> None:
        chosen = algebra("S5")

        def index(*permutation: int) -> int:
            return chosen.elements.index(tuple(i - 1 for i in permutation))

        sigmas = [index(5, 4, 1, 3, 2), index(3, 4, 1, 2, 5), index(5, 3, 1, 2, 4)]
        expected = [sigmas[0], index(1, 3, 5, 4, 2), index(2, 5, 1, 3, 4)]
        assert prefix_products(chosen, torch.tensor([sigmas])).tolist() == [expected]

    @pytest.mark.parametrize("name", ["S5", "A5xM", "Z2xMxZ3"])
    @pytest.mark.parametrize("length", [*range(1, 12), 16, 17, 100])
    def test_agrees_with_the_definition(self, name: str, length: int) -> None:
        chosen, tokens = algebra(name), random_tokens(name, 3, length)
        products = prefix_products(chosen, tokens)
        assert products.dtype == torch.int64 and products.is_contiguous()
        assert torch.equal(products, slow_prefix_products(chosen, tokens))

    def test_accepts_any_integers_and_layout_and_leaves_them(self) -> None:
        chosen, tokens = algebra("A5"), random_tokens("A5", 5, 9)
        before, expected = tokens.clone(), prefix_products(chosen, tokens)
        assert torch.equal(prefix_products(chosen, tokens.to(torch.uint8)), expected)
        assert torch.equal(prefix_products(chosen, tokens.t().contiguous().t()), expected)
        assert torch.equal(tokens, before)


class TestSample:
    @pytest.mark.parametrize("name", ["A5", "Z2xS3", "A4xM", "MxZ5", "Z2xMxZ3", "M", "MxM"])
    @pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
    def test_frequencies(self, name: str, p: float) -> None:
        chosen = algebra(name)
        generator = torch.Generator(torch.get_default_device()).manual_seed(3)
        tokens, targets = sample(chosen, 500, 200, identity_probability=p, generator=generator)
        assert torch.equal(targets, prefix_products(chosen, tokens))

        group, monoid = chosen.parts
        expected = torch.full((len(group), len(monoid)), 1 / len(monoid), dtype=torch.float64)
        if len(group) > 1:
            share = torch.full((len(group), 1), (1 - p) / (len(group) - 1), dtype=torch.float64)
            share[group == chosen.identity] = p
            expected *= share
        counts = tokens.flatten().bincount(minlength=len(chosen)).double()
        counts = counts[group[:, None] + monoid - chosen.identity]
        assert bool((counts[expected == 0] == 0).all())

        possible = expected > 0
        mean = expected[possible] * tokens.numel()
        chi_square = ((counts[possible] - mean) ** 2 / mean).sum().item()
        freedom = max(1, int(possible.sum()) - 1)
        assert chi_square < freedom + 5 * math.sqrt(2 * freedom)

    def test_extreme_probabilities_stay_in_range(self) -> None:
        for p in (1e-17, 1 - 2**-53, math.nextafter(1.0, 0.0)):
            generator = torch.Generator(torch.get_default_device()).manual_seed(0)
            tokens, _ = sample(algebra("A5"), 100, 100, identity_probability=p, generator=generator)
            assert int(tokens.min()) >= 0 and int(tokens.max()) < 60

    def test_seeded(self) -> None:
        def draw(seed: int) -> torch.Tensor:
            generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
            chosen = algebra("A5xM")
            return sample(chosen, 4, 8, identity_probability=0.5, generator=generator)[0]

        assert torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))

    @pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
    def test_rejects_probabilities(self, p: float) -> None:
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            sample(algebra("A5"), 2, 2, identity_probability=p, generator=torch.Generator())

    @pytest.mark.parametrize(("batch", "length"), [(0, 4), (4, 0), (4, -1)])
    def test_rejects_sizes(self, batch: int, length: int) -> None:
        with pytest.raises(ValueError, match="must be a whole number >= 1"):
            sample(algebra("A5"), batch, length, identity_probability=0.5, generator=torch.Generator())

    @pytest.mark.parametrize(("batch", "length"), [(2**15, 2**16), (2, 10**30), (10**14, 20)])
    def test_rejects_more_tokens_than_memory_holds(self, batch: int, length: int) -> None:
        with pytest.raises(ValueError, match=f"{batch} sequences of {length} tokens are more than "):
            sample(algebra("A5"), batch, length, identity_probability=0.5, generator=torch.Generator())


def make_stream(lengths: tuple[int, int] = (3, 9), seed: int = 5) -> WordProblemStream:
    return WordProblemStream(algebra("A5xM"), lengths, identity_probability=0.5, seed=seed, batch_size=4)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


class TestStream:
    def test_batches_are_aligned_problems(self) -> None:
        for batch in map(make_stream().batch, range(5)):
            assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
            expected = prefix_products(algebra("A5xM"), batch["input_ids"])
            assert torch.equal(batch["labels"], expected)

    def test_depends_on_seed_and_index_alone(self) -> None:
        batches = [make_stream().batch(index) for index in range(8)]
        torch.manual_seed(99)
        stream = make_stream()
        for index in (7, 0, 3):
            assert same(stream.batch(index), batches[index])
        assert not same(make_stream(seed=6).batch(3), batches[3])

    def test_lengths_are_uniform(self) -> None:
        stream = make_stream((3, 6))
        lengths = torch.tensor([stream.batch(i)["labels"].shape[1] for i in range(600)])
        counts = lengths.bincount()
        assert len(counts) == 7 and counts[:3].sum() == 0
        assert bool(((counts[3:] - 150).abs() < 5 * math.sqrt(150)).all())

    def test_batch_seeds_never_repeat_within_a_stream(self) -> None:
        seeds = {batch_seed(1, i) & 0xFFFFFFFF for i in range(100_000)}
        assert len(seeds) == 100_000
        assert batch_seed(1, 0) != batch_seed(1 + 2**32, 0)
        # These values must never change: saved runs rely on them.
        assert [batch_seed(0, 0), batch_seed(1, 2)] == [0, 779996176]


class TestDataset:
    @staticmethod
    def make(seed: int = 1) -> WordProblems:
        return generate(algebra("A5xM"), sequences=6, length=9, identity_probability=0.9, seed=seed)

    def test_determined_by_the_arguments(self) -> None:
        dataset = self.make()
        assert dataset.tokens.shape == (6, 9)
        assert torch.equal(dataset.targets, prefix_products(algebra("A5xM"), dataset.tokens))
        assert torch.equal(self.make().tokens, dataset.tokens)
        assert not torch.equal(self.make(seed=2).tokens, dataset.tokens)


class TestCsv:
    def test_golden_rows(self, tmp_path: Path) -> None:
        path, copy = tmp_path / "A5=6.csv", tmp_path / "copy.csv"
        path.write_text(GOLDEN_CSV)
        tokens, targets, seed = read_csv(path, algebra_of_csv(path))
        assert seed == 7
        assert tokens[1].tolist() == [59, 1, 0, 58, 20, 33]
        assert torch.equal(targets, slow_prefix_products(algebra("A5"), tokens))
        write_csv(copy, tokens, targets, seed)
        assert copy.read_bytes() == path.read_bytes()

    @pytest.mark.parametrize("name", ["S3", "A4xZ5", "A5xM"])
    def test_round_trip(self, name: str, tmp_path: Path) -> None:
        tokens = random_tokens(name, 20, 7)
        targets = prefix_products(algebra(name), tokens)
        path = tmp_path / f"{name}=7.csv"
        write_csv(path, tokens, targets, seed=42)
        self.assert_reads_as_written(path, tmp_path / "copy.csv")

    def test_benchmark_files(self, optional_data: Callable[[str], Path], tmp_path: Path) -> None:
        files = sorted(optional_data("data/word_problem").glob("*.csv"))
        assert files
        for file in files:
            self.assert_reads_as_written(file, tmp_path / "copy.csv")

    @staticmethod
    def assert_reads_as_written(file: Path, copy: Path) -> None:
        write_csv(copy, *read_csv(file, algebra_of_csv(file)))
        assert copy.read_bytes() == file.read_bytes()

    def test_elements_are_numbered_as_in_files(self) -> None:
        assert algebra("A5").elements[1] == (0, 1, 3, 4, 2)
        assert algebra("A5").table[1, 3] == 6 and algebra("A5").table[3, 1] == 5

    def test_benchmark_tables(self, optional_data: Callable[[str], Path]) -> None:
        file = optional_data("data/word_problem") / "group_tables.json"
        for name, known in json.loads(file.read_text()).items():
            assert algebra(name).table.tolist() == known["table"]

    @pytest.mark.parametrize(
        ("old", "new", "complaint"),
        [
            ("seed,input", "seed,inputs", "line 1: header"),
            ("11 16", "11 17", "line 2: targets"),
            ("9 15", "9 16", "line 3: targets"),
            ("7,59", "7,60", r"line 3: inputs must lie in \[0, 60\)"),
            ("7,59", "8,59", "line 3: seed is 8"),
            ("7,59", "7,x", "line 3"),
            ("7,59", f"7,{'59 ' * 50_000}", "line 3: field larger than field limit"),
            ("7,59", f"7,{'9' * 5_000}", r"line 3: \['7', '9999"),
            ("7,59", "7,\xff\0", r"line 3: \['7', '.* is not seed, input, target"),
            (" 20 33", " 20", "line 3"),
            (" 58 20 33,59 58 58 25 9 15", ",59 58 58", "line 3: length is 3"),
            (GOLDEN_CSV[18:], "", "line 2: missing"),
            (GOLDEN_CSV, "", "line 1: header"),
        ],
    )
    def test_names_the_first_wrong_line(self, old: str, new: str, complaint: str, tmp_path: Path) -> None:
        assert old in GOLDEN_CSV
        path = tmp_path / "A5=6.csv"
        path.write_text(GOLDEN_CSV.replace(old, new))
        with pytest.raises(ValueError, match=complaint) as caught:
            read_csv(path, algebra("A5"))
        assert len(str(caught.value)) < 1_000

    @pytest.mark.parametrize("name", ["A5.csv", "A5=20.txt", "A5=x.csv", "Q8=20.csv"])
    def test_file_names(self, name: str) -> None:
        with pytest.raises(ValueError):
            algebra_of_csv(Path("folder") / name)
        assert algebra_of_csv("folder/A4_x_Z5=20.csv") is algebra("A4xZ5")
