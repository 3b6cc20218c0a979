"""Side by side with other engines: one worker process an engine, all spoken to in the same words. See compare_peers.py."""
