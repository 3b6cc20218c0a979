"""Connects the engine with the policies: one chain of drafters, and for each row the policy that its options name. What no policy has a
say in the engine asks the chain for itself.

Rows of several policies may share a round. Each policy sees its own rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlxspec.cache.model_cache import Snapshot
from mlxspec.config import MAX_DRAFT, SpecConfig
from mlxspec.drafters.base import Unread
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.plan import RoundPlan
from mlxspec.models.image_rows import SeenImages
from mlxspec.policy.auto import Auto
from mlxspec.policy.base import Policy
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel
from mlxspec.sampling.row import RowSampler


class Drafting:
    """See above. auto: the policy of that name, None until `follow` gives it a controller: its rows are drafted for as fixed ones then."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.auto: Auto | None = None
        self._fixed = Policy(chain)
        self._policies: dict[int, Policy] = {}
        self._led: dict[int, Policy] = {}

    def follow(self, control: Controller) -> None:
        """Rows that begin from now on and whose policy is auto draft as the controller chooses."""
        self.auto = Auto(self.chain, control)

    @property
    def costs(self) -> CostModel:
        """What policy auto knows of costs; nothing where no row may follow it."""
        return CostModel() if self.auto is None else self.auto.control.costs

    def lead(self, row: int, policy: Policy) -> None:
        """The row of this number, which has not begun, follows a policy of its own."""
        self._led[row] = policy

    def begin(
        self,
        row: int,
        spec: SpecConfig,
        sampler: RowSampler,
        seen: SeenImages | None = None,
        num_prompt: int = 0,
    ) -> ChainRow:
        """A new row, which its options' drafters draft for. seen, num_prompt: as in `Chain.begin`."""
        state = self.chain.begin(row, spec, sampler, seen, num_prompt)
        if self.auto is not None:
            self.auto.wake()
        chosen = self.auto if self.auto is not None and spec.policy == "auto" else self._fixed
        policy = self._policies[row] = self._led.pop(row, chosen)
        policy.begin(state)
        return state

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """The row's text goes on. hidden: as `Drafter.observe` has it."""
        self._policies[row].observe(self.chain.hear(row, tokens, hidden), len(tokens))

    def prime(self, row: int) -> None:
        """The row's answer begins: drafters that are likely to draft for it run its prompt."""
        state, policy = self._told(row)
        policy.answers(state)
        self.chain.prime(state)

    def snapshot(self, row: int, length: int, starts: Mapping[str, int]) -> dict[str, Snapshot]:
        """What drafters keep for the row's first `length` tokens, by name. starts: see `Chain.snapshot`."""
        return self.chain.snapshot(self._told(row)[0], length, starts)

    def resume(self, row: int, tokens: Sequence[int], kept: Mapping[str, Snapshot]) -> None:
        """The row begins with `tokens`, which its drafters have not heard. kept: see `Chain.resume`."""
        self.chain.resume(self.chain.state(row), tokens, kept)

    def plan(
        self,
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        vocab_size: int,
        *,
        longest: int = MAX_DRAFT,
        unread: Unread | None = None,
    ) -> RoundPlan:
        """A round of the rows in `rooms`, in that order; see `RoundPlan`."""
        rows = tuple(map(self.chain.state, rooms))
        return RoundPlan(
            rows=rows,
            rooms=rooms,
            histories=histories,
            vocab_size=vocab_size,
            longest=longest,
            unread=unread,
        )

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
        """What each row submits; rows without a proposal are absent."""
        won: dict[int, Proposal] = {}
        for policy, rows in self._by_policy(plan.rooms):
            won |= policy.propose(plan.of(rows))
        return won

    def propose_behind(self, plan: RoundPlan) -> dict[int, Proposal] | None:
        """Drafts behind a round that has not been read, see `Policy.propose_behind`; None for rows of several policies, and where a
        token must be seen between drafting and verifying."""
        found = self._by_policy(plan.rooms)
        is_blind = all(state.is_blind for state in plan.rows)
        return found[0][0].propose_behind(plan) if len(found) == 1 and is_blind else None

    def take_up(self, rows: Sequence[int], proposals: Sequence[Proposal]) -> None:
        """A round's turn has come to be read. rows: its, with the proposal of each; some may be gone."""
        found = dict(zip(rows, proposals, strict=True))
        for policy, some in self._by_policy([r for r in rows if r in self._policies]):
            policy.take_up({state.row: found[state.row].decided for state in some})

    def plain(self, rows: Sequence[int], plan: Callable[[], RoundPlan]) -> bool:
        """Whether a plain round is next for all these rows, so that it need not wait for the tokens of this one. plan: that round."""
        found = self._by_policy(rows)
        return len(found) == 1 and found[0][0].plain(found[0][1], plan)

    def took(
        self, rows: Sequence[int], num_tokens: int, seconds: float, *, ahead: bool, is_warm: bool
    ) -> None:
        """A round over these rows has been read; some may be gone or never have drafted. ahead, is_warm: see `Policy.took`."""
        for policy, some in self._by_policy([r for r in rows if r in self._policies]):
            policy.took(some, len(rows), num_tokens, seconds, ahead=ahead, is_warm=is_warm)

    def close(self, row: int) -> None:
        """The row is gone."""
        policy = self._policies.pop(row, None)
        if policy is not None:
            policy.close(row)
        self.chain.close(row)

    def _by_policy(self, rows: Sequence[int] | Mapping[int, int]) -> list[tuple[Policy, list[ChainRow]]]:
        """Each policy with those of the rows that follow it, in their order."""
        found: dict[Policy, list[ChainRow]] = {}
        for row in rows:
            found.setdefault(self._policies[row], []).append(self.chain.state(row))
        return list(found.items())

    def _told(self, row: int) -> tuple[ChainRow, Policy]:
        """A row whose drafters have heard all of its text, and its policy."""
        state, policy = self.chain.state(row), self._policies[row]
        policy.tell(state)
        return state, policy
