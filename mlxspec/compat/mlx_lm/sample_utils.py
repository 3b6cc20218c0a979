"""mlx-lm's samplers and logits processors, as they are: our engine calls them where mlx-lm would."""

from mlx_lm.sample_utils import *  # noqa: F403
from mlx_lm.sample_utils import make_logits_processors, make_sampler

__all__ = ["make_logits_processors", "make_sampler"]
