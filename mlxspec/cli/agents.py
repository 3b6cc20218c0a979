"""Agents that `mlxspec launch` runs, and the settings that make each use a server on this machine instead of its maker's.

The settings are environment variables and arguments of one process. They win over the agent's own configuration files, which are not
changed. Knows the agents' variables and options; starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxspec.server.settings import KEY_VARIABLE

PROVIDER = "mlxspec"  # what Codex and opencode call the server


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model of a server on this machine, for an agent to use. root: address of the server without /v1; key: its API key; model: name
    under which it serves the model; context: tokens of the model's context, None where unknown."""

    root: str
    key: str
    model: str
    context: int | None = None


@dataclass(frozen=True, kw_only=True)
class Told:
    """The environment variables and arguments that make an agent use a server. The arguments are put before the user's own."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent that `mlxspec launch` can start. package: its name on npm. version: the version that the figures are of. num_prompt:
    tokens of its first prompt, estimated as a quarter of its bytes. least: the least length of a conversation, in tokens, at which
    the agent condenses it automatically. tell: returns the agent's environment and arguments for a served model."""

    title: str
    package: str
    version: str
    num_prompt: int
    least: int
    tell: Callable[[ServedModel], Told]


def _claude(at: ServedModel) -> Told:
    models = ("", "_DEFAULT_FABLE", "_DEFAULT_OPUS", "_DEFAULT_SONNET", "_DEFAULT_HAIKU")
    said = {
        "ANTHROPIC_BASE_URL": at.root,
        "ANTHROPIC_AUTH_TOKEN": at.key,  # a key in ANTHROPIC_API_KEY is asked about at each start
        "ANTHROPIC_API_KEY": "",
        **{f"ANTHROPIC{kind}_MODEL": at.model for kind in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": at.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **({} if at.context is None else {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(at.context)}),
    }
    # variables in the user's settings.json count before those of the process, and these before both
    return Told(environment=said, arguments=("--settings", json.dumps({"env": said})))


def _codex(at: ServedModel) -> Told:
    provider = {
        "name": PROVIDER,
        "base_url": f"{at.root}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
    }
    said = {
        "model": json.dumps(at.model),
        "model_provider": json.dumps(PROVIDER),
        f"model_providers.{PROVIDER}": "{"
        + ", ".join(f"{k}={json.dumps(v)}" for k, v in provider.items())
        + "}",
        **({} if at.context is None else {"model_context_window": str(at.context)}),
    }
    given = [word for name, value in said.items() for word in ("-c", f"{name}={value}")]
    return Told(environment={KEY_VARIABLE: at.key}, arguments=tuple(given))


def _opencode(at: ServedModel) -> Told:
    limit = {} if at.context is None else {"limit": {"context": at.context, "output": at.context // 4}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{at.root}/v1", "apiKey": at.key},
        "models": {at.model: {"name": at.model, **limit}},
    }
    name = f"{PROVIDER}/{at.model}"
    said = {"provider": {PROVIDER: provider}, "model": name, "small_model": name}
    return Told(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(said)})


# By the command that starts it.
AGENTS = {
    "claude": Agent(
        title="Claude Code",
        package="@anthropic-ai/claude-code",
        version="2.1.197",
        num_prompt=19_000,
        least=100_000,
        tell=_claude,
    ),
    "codex": Agent(
        title="Codex", package="@openai/codex", version="0.169.0", num_prompt=10_000, least=0, tell=_codex
    ),
    "opencode": Agent(
        title="opencode", package="opencode-ai", version="1.18.33", num_prompt=8_000, least=0, tell=_opencode
    ),
}
