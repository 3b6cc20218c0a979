"""Splits a model's text into reasoning, content and tool calls while it is written. Works on text only."""
