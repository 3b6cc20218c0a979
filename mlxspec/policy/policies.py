"""The policies of an engine: which one a row follows."""

from __future__ import annotations

from mlxspec.config import SpecConfig
from mlxspec.drafters.policy import Policy
from mlxspec.policy.auto import Auto
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel
from mlxspec.policy.fixed import Fixed


class Policies:
    """The policies of one engine. auto: the policy of that name, None until `follow` gives it a controller; until then rows of policy
    auto follow policy fixed."""

    def __init__(self) -> None:
        self.auto: Auto | None = None
        self._fixed = Fixed()
        self._led: dict[int, Policy] = {}

    def follow(self, control: Controller) -> None:
        """Let rows that begin from now on with policy auto draft as this controller chooses."""
        self.auto = Auto(control)

    @property
    def costs(self) -> CostModel:
        """Return the costs of policy auto; empty costs where no row may follow it."""
        return CostModel() if self.auto is None else self.auto.control.costs

    def lead(self, number: int, policy: Policy) -> None:
        """Let the row of this number, which has not begun, follow the given policy."""
        self._led[number] = policy

    def of(self, number: int, spec: SpecConfig) -> Policy:
        """Return the policy of a row that begins with these options."""
        chosen = self.auto if self.auto is not None and spec.policy == "auto" else self._fixed
        return self._led.pop(number, chosen)
