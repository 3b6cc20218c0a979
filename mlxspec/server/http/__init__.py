"""What a request passes before its API reads it: connections, who may ask, limits, turns, its body, and the log."""
