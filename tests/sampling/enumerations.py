"""Makes honest enumerations, for judging whether a text loops: 25 kinds of texts that go through many items one by one.

Items of one text are alike, as in thinking that checks case after case, yet each brings something: a number that counts, a value that
alternates without a period, a part that grows. `enumerations` gives 200 texts of up to 160 items, the same ones every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from itertools import islice, product

_WORDS = (
    "amber birch cedar delta ember fjord grove haven islet jetty knoll larch mango nexus olive pearl quail ridge slate tulip umbra "
    "viola wharf xenon yucca zebra"
).split()
Kind = Callable[[random.Random], Iterator[str]]


def calendar(rng: random.Random) -> Iterator[str]:
    day = date(2020 + rng.randrange(8), 1 + rng.randrange(12), 1)
    while True:
        yield f"{day:%A, %d %B %Y}: nothing is booked on this day, the room is free from nine to five.\n"
        day += timedelta(days=1)


def log_lines(rng: random.Random) -> Iterator[str]:
    second = rng.randrange(80_000)
    while True:
        yield f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02} INFO worker heartbeat ok, queue empty, no retries\n"
        second += 1


def letters(rng: random.Random) -> Iterator[str]:
    place = rng.choice(("list", "book", "register", "roll", "index", "file", "table", "map"))
    for word in islice(product("abcdefghijklmnopqrstuvwxyz", repeat=2), rng.randrange(400), None):
        yield f"Does any name begin with {''.join(word)}? No name in the {place} does, so go on.\n"


def roman(rng: random.Random) -> Iterator[str]:
    steps = (
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    )
    for number in range(rng.randrange(1, 30), 399):
        text, rest = "", number
        for value, letter in steps:
            text += letter * (rest // value)
            rest %= value
        yield f"Article {text}. The contracting parties agree to the terms that are laid down in the annex.\n"


def addresses(rng: random.Random) -> Iterator[str]:
    net = rng.randrange(256)
    for host in range(1, 255):
        yield f"10.0.{net}.{host} is up, port 22 open, port 80 closed, port 443 closed\n"


def inserts(rng: random.Random) -> Iterator[str]:
    first = rng.randrange(10_000)
    for i in range(first, first + 400):
        yield f"INSERT INTO users (id, active, role, quota) VALUES ({i}, TRUE, 'member', 0);\n"


def elements(rng: random.Random) -> Iterator[str]:
    for x in range(rng.randrange(500), 9000, 1 + rng.randrange(9)):
        yield f'<rect x="{x}" y="0" width="10" height="10" fill="none" stroke="black"/>\n'


def instructions(rng: random.Random) -> Iterator[str]:
    for place in range(0x400 * rng.randrange(1, 60), 1 << 20, 4):
        yield f"0x{place:06x}:  mov  eax, eax   ; this does nothing and changes no flag\n"


def bottles(rng: random.Random) -> Iterator[str]:
    for n in range(300 + rng.randrange(90), 0, -1):
        yield f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down, pass it around.\n"


def binary(rng: random.Random) -> Iterator[str]:
    for n in range(rng.randrange(1, 90), 9999):
        yield f"{n:012b} has {n.bit_count()} bits set\n"


def truth_table(rng: random.Random) -> Iterator[str]:
    names = rng.sample("pqrstuvw", 7)
    for values in product((False, True), repeat=7):
        yield (
            ", ".join(f"{n} is {str(v).lower()}" for n, v in zip(names, values, strict=True))
            + ": the clause holds\n"
        )


def coin(rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(
            ("The coin shows heads, so we go left.\n", "The coin shows tails, so we go right.\n")
        )


def thue_morse(rng: random.Random) -> Iterator[str]:
    """It alternates, and no period comes three times."""
    one, other = rng.sample(_WORDS, 2)
    for n in range(rng.randrange(64), 9999):
        yield f"Now it is {other if n.bit_count() % 2 else one}'s turn to move a stone from the heap. "


def growing_sum(rng: random.Random) -> Iterator[str]:
    text, total = "", 0
    while len(text) < 300:
        n = rng.randrange(10, 99)
        text, total = f"{text} + {n}" if text else str(n), total + n
        yield f"{text} = {total}\n"


def house(rng: random.Random) -> Iterator[str]:
    """A cumulative rhyme: each verse is the last one and a line more."""
    told = "the house that Jack built."
    for word in rng.sample(_WORDS, len(_WORDS)):
        told = f"the {word} that lay in {told}"
        yield f"This is {told}\n"


def triangle(rng: random.Random) -> Iterator[str]:
    mark = rng.choice("*#ox")
    for n in range(rng.randrange(1, 30), 150):
        yield f"{mark * n}\n"


def primes(rng: random.Random) -> Iterator[str]:
    for n in range(rng.randrange(100, 900), 99_999):
        least = next((d for d in range(2, n) if n % d == 0), n)
        yield f"{n}: the smallest divisor above one is {least}.\n"


def collatz(rng: random.Random) -> Iterator[str]:
    while True:
        n = rng.randrange(27, 9999)
        while n > 1:
            yield f"{n} is {'odd' if n % 2 else 'even'}, so the next one is {3 * n + 1 if n % 2 else n // 2}. "
            n = 3 * n + 1 if n % 2 else n // 2


def entries(rng: random.Random) -> Iterator[str]:
    size = rng.randrange(7, 19)
    for i, j in product(range(1, 99), range(1, size)):
        yield f"a_{{{i},{j}}} = 0 because the matrix is zero outside the diagonal. "


def imports(rng: random.Random) -> Iterator[str]:
    for one, other in product(rng.sample(_WORDS, 20), rng.sample(_WORDS, 20)):
        yield f"from package.{one}.{other} import handler as {one}_{other}_handler\n"


def asserts(rng: random.Random) -> Iterator[str]:
    for n in range(rng.randrange(500), 999):
        yield f"    assert encode(decode({n})) == {n}, 'round trip failed'\n"


def board(rng: random.Random) -> Iterator[str]:
    for name, file, rank in product(
        rng.sample(("knight", "bishop", "rook", "queen"), 4), "abcdefgh", range(1, 9)
    ):
        yield f"The {name} on {file}{rank} attacks no other piece, so this square is safe.\n"


def people(rng: random.Random) -> Iterator[str]:
    for one, other in product(rng.sample(_WORDS, 26), rng.sample(_WORDS, 26)):
        yield f"{one.title()} and {other.title()} have no common divisor, no common friend and no common room.\n"


def files(rng: random.Random) -> Iterator[str]:
    for n in range(rng.randrange(1000), 99_999):
        yield f"-rw-r--r-- 1 root root 4096 Jan  1 00:00 shard-{n:05}-of-99999.bin\n"


def ranges(rng: random.Random) -> Iterator[str]:
    width = rng.choice((5, 10, 25, 50))
    for low in range(rng.randrange(90) * width, 99_999, width):
        yield f"Between {low} and {low + width}: no sample falls into this bin, so its count is zero.\n"


KINDS: tuple[Kind, ...] = (
    calendar, log_lines, letters, roman, addresses, inserts, elements, instructions, bottles, binary, truth_table, coin, thue_morse,
    growing_sum, house, triangle, primes, collatz, entries, imports, asserts, board, people, files, ranges,
)  # fmt: skip


def enumerations() -> list[tuple[str, str]]:
    """(kind, text) of eight texts of each kind."""
    found = []
    for kind in KINDS:
        for seed in range(8):
            rng = random.Random(f"{kind.__name__} {seed}")
            found.append((kind.__name__, "".join(islice(kind(rng), rng.randrange(80, 160)))))
    return found
