"""The policies of an engine: which one a row follows."""

from __future__ import annotations

from mlxspec.config import SpecConfig
from mlxspec.drafters.policy import Policy
from mlxspec.policy.auto import Auto
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel
from mlxspec.policy.fixed import Fixed


class Policies:
    """One engine's. auto: the policy of that name, None until `follow` gives it a controller. Until then fixed stands for it."""

    def __init__(self) -> None:
        self.auto: Auto | None = None
        self._fixed = Fixed()
        self._led: dict[int, Policy] = {}

    def follow(self, control: Controller) -> None:
        """Let rows that begin from now on and whose policy is auto draft as the controller chooses."""
        self.auto = Auto(control)

    @property
    def costs(self) -> CostModel:
        """The costs that policy auto knows; empty where no row may follow it."""
        return CostModel() if self.auto is None else self.auto.control.costs

    def lead(self, number: int, policy: Policy) -> None:
        """Let the row of this number, which has not begun, follow a policy of its own."""
        self._led[number] = policy

    def of(self, number: int, spec: SpecConfig) -> Policy:
        """The policy of a row that begins."""
        chosen = self.auto if self.auto is not None and spec.policy == "auto" else self._fixed
        return self._led.pop(number, chosen)
