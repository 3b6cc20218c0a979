"""mlx-lm's Python interface on our engine: write `mlxspec.compat.mlx_lm` for `mlx_lm`, and a script drafts, hybrids included.

    from mlxspec.compat.mlx_lm import load, generate, stream_generate, batch_generate
    from mlxspec.compat.mlx_lm.models.cache import make_prompt_cache, save_prompt_cache, load_prompt_cache
    from mlxspec.compat.mlx_lm.sample_utils import make_sampler

Signatures and responses are mlx-lm's own; the tokenizer is the very one mlx-lm would load. Greedy text is mlx-lm's up to float ties. What
cannot be honoured is an error that names itself.
"""

from mlxspec.compat.mlx_lm.generate import batch_generate, generate, generate_step, stream_generate
from mlxspec.compat.mlx_lm.utils import LoadedModel, load

__all__ = ["LoadedModel", "batch_generate", "generate", "generate_step", "load", "stream_generate"]
