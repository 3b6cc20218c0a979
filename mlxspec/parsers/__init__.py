"""What a model writes, taken apart while it is written: reasoning, content, tool calls. Knows text; knows no tokens, no engine, no HTTP."""
