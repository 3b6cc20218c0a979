"""The forms of requests and answers, as pydantic models: one module for each API, in reading order."""
