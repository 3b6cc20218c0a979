"""Engines in several processes, the ranks, that run one model divided among them (tensor parallel). Rank 0 decides, the others do the same.

    orders.py       the message that rank 0 sends before each step: everything that its clock and its callers have decided
    line.py         the connections between rank 0 and the others, and how a rank that has ended or hangs is noticed
    peers.py        how ranks find each other at the start, and what they must agree on
    rank_group.py   the hook that an engine calls (engine/group.py), for one rank of several
    lead.py         rank 0: what it has decided goes into orders
    follow.py       the other ranks: they obey orders until rank 0 ends

Every rank runs the same engine on the same requests. What an engine does follows from its requests and from what it has computed, which is
the same on every rank, except for clocks, callers and the machine's memory. These are read on rank 0 alone.
"""
