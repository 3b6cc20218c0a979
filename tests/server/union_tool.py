"""A server of the Model Context Protocol with one tool whose argument is a union, as pydantic writes one with a discriminator: `python
union_tool.py FILE`. A call whose argument is of exactly one branch adds "three" to the file, any other adds "wrong"."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NAME = "note_it"
BRANCHES: dict[str, Any] = {  # without limits of length, which Codex takes out
    "Word": {"word": {"type": "string", "enum": ["this", "that"]}},
    "Flag": {"flag": {"type": "boolean"}},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "note": {
            "oneOf": [{"$ref": f"#/$defs/{name}"} for name in BRANCHES],
            "discriminator": {
                "propertyName": "kind",
                "mapping": {name.lower(): f"#/$defs/{name}" for name in BRANCHES},
            },
        }
    },
    "required": ["note"],
    "additionalProperties": False,
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"type": "string", "const": name.lower()}, **properties},
            "required": ["kind", *properties],
            "additionalProperties": False,
        }
        for name, properties in BRANCHES.items()
    },
}


def is_right(arguments: Any) -> bool:
    """Return whether these arguments are of one branch, with nothing else."""
    match arguments:
        case {"note": {"kind": "word", "word": "this" | "that", **more}, **others}:
            return not more and not others
        case {"note": {"kind": "flag", "flag": bool(), **more}, **others}:
            return not more and not others
    return False


def result_of(message: dict[str, Any], file: Path) -> dict[str, Any]:
    """Answer a request of the protocol."""
    match message:
        case {"method": "initialize", "params": {"protocolVersion": version}}:
            served = {"name": "notes", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": served}
        case {"method": "tools/list"}:
            return {"tools": [{"name": NAME, "description": "Note it.", "inputSchema": SCHEMA}]}
        case {"method": "tools/call", "params": {"arguments": arguments}}:
            with file.open("a") as out:
                out.write("three\n" if is_right(arguments) else f"wrong:{json.dumps(arguments)}\n")
            return {"content": [{"type": "text", "text": "noted"}], "isError": False}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            found = {"jsonrpc": "2.0", "id": asked["id"], "result": result_of(asked, Path(sys.argv[1]))}
            print(json.dumps(found), flush=True)
