"""The prefix store on disk: files of keys, values and recurrent states, from which a later process continues texts.

The store in memory (prefix_store.py) is a tree whose edges are cut anew when texts branch. Files are written once, so here a text is cut
at fixed places. A *part* is the target, or one drafter. For each part of a text of L tokens there are two kinds of *pieces*, each a file:
  block   keys and values of BLOCK tokens; block i holds tokens i * BLOCK to (i + 1) * BLOCK. Texts that begin alike share their blocks;
  end     a state that texts continue from: what the part keeps behind all L tokens (recurrent states, windows, last hidden), and keys and
          values of the L % BLOCK tokens behind the last whole block.
A text is continued from an end of the target whose blocks are all there. The target's final hiddens, which drafters catch up from, are a
part of their own (SOURCES).

A piece's name is a digest of what it was computed from: the signature of the part (signature.py: weights, dtypes, layout of the caches,
device, version of the format), and all tokens up to its end. What was written by another model, another quantization, another drafter or
another version has other names. Token ids are in no file.

    signature.py   what a part was computed by, as digests
    piece.py       one file: label, tensors, checksum
    folder.py      all files: index, size limit, lock, eviction
    plan.py        a text's pieces: their names, and which of them continue a prompt
    mover.py       the thread that reads and writes files
    disk.py        the engine's side: what is written, in slices between rounds; what is read

Invariants (tests hold each, with crashes at every file operation):
- A piece that is served has the bytes that were written: the checksum covers label and data, and is verified at each read. What fails is
  a miss, is removed and is logged once.
- A file gets its name when it is complete: written under another name, fsync, rename. A crash loses pieces that were being written and
  no others; leftovers are removed by whoever locks the folder next.
- The files of the folder never take more bytes than the limit, whichever process writes: room is made before a write, under the lock.
- An end is written behind all pieces that it needs, and its text's pieces count as used when it is. Eviction takes the least recently
  used piece first, of those the one of the longest text. So what an end needs is dropped after the end.
- One thread reads and writes. The engine's thread alone touches MLX: it copies at most SLICE bytes between two rounds (or one array, where
  that is larger), and spends at most one part in BUSY_SHARE of the time so while rows decode. It never waits for the disk while there is
  anything else to do.
- Host memory is at most two pieces on their way to the disk, and what is being read. The store in memory has that much less.
- Only what the store in memory has kept as an anchor is written. What leaves memory before it was written is not on disk; it is counted.
"""
