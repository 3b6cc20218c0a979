"""The way of a request until its API reads it: connections, who may ask, limits, turns, its body, and the log."""
