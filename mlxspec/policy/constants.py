"""The numbers that policy auto is tuned by, each with its unit and its reason.

`scripts/simulate --sensitivity` halves and doubles each of them and prints the worst and the mean cell. Two kinds of numbers are no tuning
and stand beside the code that uses them: grids (widths that are timed, depths that drafts are cut to, cells of confidence) and how long
calibration may measure (calibrate.py). A test lists both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mlxspec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Raises ConfigError for a number that is not finite or is below 0."""

    # --- the account: what drafting may lose against plain decoding
    # plain rounds: what a row may lose. The adversary of the tests may cost 4 in 20 tokens; with less, drafting often ends by chance
    credit: float = 3.8
    # share of a row's time that it may lose besides: what a probe every now and then costs
    earn: float = 0.005
    # plain rounds: most that a row keeps of what it has gained, which is what a good stretch can lose again
    cap: float = 16.0
    # plain rounds: what probes of a row alone may take of its credit, whatever they show
    probe: float = 1.5
    # share of that, and of what time earns, which a row may spend at least on probes. Each row that gained nothing by them halves the
    # next one's share, and turns of a drafter beside a better one get this share. Without it a head that is never right costs 2.4 % in
    # every row, with it less than 2 %
    hope: float = 0.25
    # plain rounds: what a lookup's draft may be expected to lose before lookups have gained, and half as much when they have lost. Without
    # it four rows are up to 3 % slower in the simulation while nothing is known yet
    caution: float = 0.5

    # --- choosing: what a draft must be expected to gain
    # tokens that a draft must gain beyond plain decoding, so that rounding alone never drafts
    margin: float = 0.02
    # how many times a wider forward counts: curves are never quite right, and too wide costs more than too narrow
    prudence: float = 1.06
    # tokens of a probe
    probe_depth: float = 3.0
    # chance that a drafted token is accepted before anything is known of its drafter
    first_chance: float = 0.75
    # share of what is known of a model's drafts that one draft replaces, once there were many
    follow: float = 0.04
    # share of what is known of a row's rate, of its lookups and of costs that one round or draft replaces
    fade: float = 0.05
    # share of its distance from certainty by which one token moves a row's own estimate of acceptance
    quick: float = 0.25
    # drafts or rounds that count for what nobody has measured yet, and for what an earlier row or old drafts showed; measured times are
    # at most so many times off a guess
    trust: float = 4.0
    # logarithm of a ratio: no single round or draft moves known costs by more, however late it was
    clip: float = 0.15
    # rounds: how long lookup is taken to stay away at first, how long rows at rest stay so before models are weighed anew, most drafts that
    # share what catching up costs, and most drafts that what earlier rows have shown of a drafter counts for in a new one
    spell: float = 8.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"The policy's {field.name} must be a number of at least 0, not {value!r}.")
        for name in ("earn", "hope", "first_chance", "follow", "fade", "quick"):
            if getattr(self, name) > 1.0:
                raise ConfigError(f"The policy's {name} is a share and cannot be more than 1.")
        if self.trust < 1.0 or self.spell < 1.0:
            raise ConfigError("The policy's trust and spell count drafts and rounds: at least 1.")
        if self.cap < self.credit:
            raise ConfigError("An account's cap must be at least what a row begins with.")
