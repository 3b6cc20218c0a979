"""Training data of the demo family, made from the running CPython's own standard library.

Knows text and syntax trees only: nothing here imports torch, mlx or a tokenizer (except `build`, which tokenizes).
Every generator takes a `random.Random` and is a pure function of it and of the files.
"""
