"""The demo family's training, from the standard library's text to the shipped folders; `scripts/train_demo` runs it.

In reading order:

    corpus, edits, copies, questions, smalltalk, pictures    what is learned: files, conversations, pictures
    dataset                                                  tokenizer, token arrays, batches
    network, gemma                                           the two text architectures
    train                                                    the loop; trunks; the draft model
    drafters                                                 those that read the target, by mlxspec's own training room
    vision_network, vision                                   the member that reads pictures
    export, evaluate                                         folders; figures and model cards

Networks and losses are PyTorch on a CPU, but for drafters. Decoding is the engine's own.
"""
