"""How much to draft and what of it stands. Knows tokens and probabilities; knows no model and no cache."""
