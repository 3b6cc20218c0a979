"""Teaches a drafter given texts, with a model that stays as it is. `scripts/adapt` runs it.

In reading order:

    states                                what is learned from: pieces of text with the model's hidden states
    network, block_network, lora_network  drafters as functions of their weights
    teach                                 the loss, the steps, and the share of drafted tokens that would be accepted
    pupil, new_drafter                    which drafter is taught, and how it is stored
    adapt, export                         a whole run; the same data for those who train elsewhere
    command                               the command line
    demo/                                 what the shipped demo family was trained on
"""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
