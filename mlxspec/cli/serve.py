"""`mlxspec serve`: runs an OpenAI-style server on this machine.

Knows options and what is printed; the server itself is mlxspec/server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare, declare_options, num_bytes, options_given
from mlxspec.cli.recommended import recommended
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.errors import ConfigError, ModelError, RankError
from mlxspec.option import near, shown
from mlxspec.option import options as option_rows
from mlxspec.server.settings import DEFAULT_MAX_TOKENS, KEY_VARIABLE, ServerConfig

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.server.http.limits import ServerLimits
    from mlxspec.server.http.run import Watch
    from mlxspec.server.models import Loaded


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, several=True)
    bound = "change a limit on the work of one client, like max_grammar=256K; may be given again; GET /limits lists all"
    group = parser.add_argument_group("server")
    declare_options(group, ServerConfig)
    declare(
        group,
        ("--alias", str, "NAME", "what clients call the model, where there is one; of several by commas the first"),
        ("--embedding-model", list, "[NAME=]M", "a model for embeddings or a reranker, held beside the others; may be given again"),
        ("--limit", list, "NAME=VALUE", bound),
    )  # fmt: skip
    memory = parser.add_argument_group("rows and memory")
    declare_options(
        memory,
        EngineConfig,
        "max_rows prefill_chunk memory_budget prefix_budget prefix_disk prefix_dir past_texts_disk",
    )
    options.add_sampling(parser, DEFAULT_MAX_TOKENS, recommended=True)
    options.add_drafting(parser)
    options.add_debug(parser)


def run(args: argparse.Namespace, tell: Callable[[str, Loaded], None] | None = None) -> int:
    """Run the server until a signal ends it. Returns 0. tell: called with the base URL and the loaded model when the server listens, in
    place of printing them."""
    from mlxspec.server.http import log
    from mlxspec.server.http.run import serve
    from mlxspec.server.library import Library
    from mlxspec.server.models import Models

    options.spec_config(args)  # what is wrong with it is said first
    with options.named_by_flags():
        config = ServerConfig(
            **options_given(args, ServerConfig) | {"api_key": _key(args.api_key)},
            limits=limits(args.limit or ()),
            params=options.sampling_params(args, max_tokens=DEFAULT_MAX_TOKENS),
        )
    watch = _watch(args)
    makers = _makers(args)
    models = {s.name: s.model for s in _served(args)}
    library = Library(models, partial(_maker, args, models))

    def sampling(name: str) -> SamplingParams:
        """Return the default sampling of requests for a served model: options of the command line, then the model's recommendation."""
        found, notice = recommended(models[name], args.revision)
        if notice is not None:
            log.writing.put(partial(terminal.note, notice))
        own = options.for_model(args, name, models[name])
        return options.sampling_params(own, max_tokens=DEFAULT_MAX_TOKENS, **found)

    try:
        beside = _beside(args, makers)
        table = Models(
            makers,
            idle_seconds=config.idle_unload,
            sampling=sampling,
            beside=beside,
            strict=config.strict_models,
        )
        has_ended = serve(
            table, config, library, tell or partial(_tell, has_key=config.api_key is not None), watch
        )
    except RankError as error:
        terminal.complain(str(error))
        os._exit(2)  # a thread may wait for a rank that is gone
    if not has_ended:
        os._exit(0)  # a thread is still busy; whoever sent the signal need not wait for it
    return 0


def _watch(args: argparse.Namespace) -> Watch | None:
    """Return a function to which the server gives its callback for a failure of a rank; None where the process is not one of several
    ranks. Raises ConfigError for options that ranks do not allow."""
    ranks = getattr(args, "ranks", None)
    if ranks is None:
        return None
    served_alone(args)
    if args.embedding_model:
        raise ConfigError("--embedding-model is for a process alone.")
    if args.idle_unload is not None:
        raise ConfigError("--idle-unload is for a process alone: ranks load their model once.")
    return partial(setattr, ranks, "on_fault")


def _makers(args: argparse.Namespace) -> dict[str, Callable[[], Engine]]:
    """Return, for each served name, a function that loads its engine. Names of one model with several adapters share one. Raises
    ConfigError."""
    makers: dict[str, Callable[[], Engine]] = {}
    if len(args.model or ()) > 1:
        _check_options_of_all(args)
    engines: dict[str, tuple[argparse.Namespace, dict[str, str | None]]] = {}
    for name, model, adapter in _served(args):
        if any(name in names for _, names in engines.values()):
            raise ConfigError(f"Two models are called {name}; --model NAME=MODEL gives them names.")
        own = _options_of(args, name, model)
        options.engine_config(own)  # what is wrong with it is said before a port is taken
        options.sampling_params(own)
        # names are one engine where nothing but adapters and sampling tells them apart
        alike = {
            k: v for k, v in vars(own).items() if f"--{k.replace('_', '-')}" not in options.SAMPLING.values()
        }
        _, names = engines.setdefault(repr(sorted(alike.items())), (own, {}))
        names[name] = adapter
    for own, names in engines.values():
        adapters = {name: adapter for name, adapter in names.items() if adapter is not None}
        make = partial(_load, own, options.spec_config(own), adapters, is_all=len(adapters) == len(names))
        makers |= dict.fromkeys(names, make)
    return makers


def _check_options_of_all(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option that applies to one model only, when several are served."""
    for flag in ("--revision", "--adapter", "--chat-template", "--alias"):
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            raise ConfigError(f"{flag} is of one model, and several were given.")


def _maker(args: argparse.Namespace, models: dict[str, str], model: str) -> Callable[[], Engine]:
    """Return a function that loads a model which the command line does not name, and add the model to `models`. Raises ConfigError where
    no other model may be served."""
    _check_options_of_all(args)
    if getattr(args, "ranks", None) is not None:
        raise ConfigError("Ranks serve the one model that they were started with.")
    own = _options_of(args, model, model)
    models[model] = model
    return partial(_load, own, options.spec_config(own), {}, is_all=False)


def _options_of(args: argparse.Namespace, name: str, model: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options.for_model(args, name, model)), "model": model})


def served_alone(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with `model` set to the single model that all ranks serve together, and with that model's own options of the
    config file. Raises ConfigError where several models are given."""
    served, *others = _served(args)
    if others:
        raise ConfigError("Ranks serve one model, and several were given.")
    return _options_of(args, served.name, served.model)


def _load(args: argparse.Namespace, spec: SpecConfig, adapters: Mapping[str, str], *, is_all: bool) -> Engine:
    """Load and return an engine with its adapters. adapters: folders by name; is_all: whether the model is served with adapters only.
    Raises MlxspecError, also where is_all and every adapter was refused."""
    engine = options.load_engine(args, spec, adapter=adapters)
    if is_all and adapters and not engine.adapters:
        raise ModelError(next(iter(engine.refused_adapters.values())))
    return engine


def _beside(args: argparse.Namespace, taken: Collection[str]) -> dict[str, Callable[[], Engine]]:
    """Return, for each model of --embedding-model by name, a function that loads its engine. taken: names of other models. Raises
    ConfigError for a name that is taken."""
    found: dict[str, Callable[[], Engine]] = {}
    for given in args.embedding_model or ():
        if not given:
            raise ConfigError("--embedding-model must not be empty.")
        name, model = _named(given, argparse.Namespace(alias=None))
        if name in taken or name in found:
            raise ConfigError(f"Two models are called {name}; --embedding-model NAME=MODEL gives them names.")
        found[name] = partial(_load_beside, model, args)
    return found


def _load_beside(model: str, args: argparse.Namespace) -> Engine:
    from mlxspec.engine.load import load

    config = EngineConfig(prefix_budget=0, prefill_chunk=args.prefill_chunk)
    return load(model, draft="off", config=config, dtype=args.dtype, images=False)


class _Served(NamedTuple):
    name: str
    model: str
    adapter: str | None


def _served(args: argparse.Namespace) -> list[_Served]:
    """Return name, model and adapter of each --model. Raises ConfigError."""
    found = []
    for given in args.model or [options.DEMO]:
        name, model = _named(given, args)
        adapter = None
        if "+" in model and not os.path.exists(os.path.expanduser(model)):
            model, _, adapter = model.partition("+")
            if not model or not adapter:
                raise ConfigError(
                    f"--model needs a model and a folder on the two sides of + in {shown(given)}."
                )
            if args.adapter is not None:
                raise ConfigError("--adapter and --model NAME=MODEL+DIR contradict each other: give one.")
        found.append(_Served(name, model, adapter))
    return found


def _named(given: str, args: argparse.Namespace) -> tuple[str, str]:
    """Return the served name and the model of one `NAME=MODEL` or `MODEL`. Without NAME, the name is that of --alias, the last part of a
    folder's path, or the model itself. Raises ConfigError where a part is empty."""
    name, equals, model = given.partition("=")
    if args.alias is not None:
        name, equals, model = (
            args.alias.split(",")[0].strip(),
            "=",
            model if equals and "/" not in name else given,
        )
        if not name:
            raise ConfigError("--alias must not be empty.")
    if equals and name and model and "/" not in name:
        return name, model
    if not given:
        raise ConfigError("--model must not be empty.")
    path = Path(given).expanduser()
    return (path.resolve().name if path.is_dir() else given), given


def _key(given: str | None) -> str | None:
    """Return the API key: as given, from a file (`@FILE`), or from the environment; None where there is none. Raises ConfigError where
    the file cannot be read."""
    if given is None:
        return os.environ.get(KEY_VARIABLE) or None
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file {given[1:]} with the API key cannot be read.") from error


def limits(given: Sequence[str]) -> ServerLimits:
    """Return the limits that the texts `NAME=VALUE` of --limit set. Raises ConfigError."""
    from mlxspec.server.http.limits import ServerLimits

    known = option_rows(ServerLimits)
    found: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        own = known.get(name.replace("-", "_"))
        if own is None:
            tip = near(name, known) or f"it knows {', '.join(known)}."
            raise ConfigError(f"--limit knows no {shown(name)}; {tip}")
        try:
            parse = num_bytes("--limit") if own.kind == "bytes" else float if own.kind is float else int
            found[own.name] = parse(value)
        except ValueError as error:
            raise ConfigError(f"--limit {name} needs a number, not {shown(value)}.") from error
    return ServerLimits(**found)


def _tell(url: str, loaded: Loaded, *, has_key: bool) -> None:
    from mlxspec.server import page

    engine = loaded.engine
    drafters = ", ".join(engine.spec.drafters) or "off"
    terminal.note(
        f"mlxspec serves {loaded.name} at {url} · {engine.max_context} tokens of context{stats_line.kept_bits(engine)}"
        f" · drafting: {drafters} · {'with' if has_key else 'without'} a key"
    )
    params = loaded.params
    if params is not None and params.temperature > 0:
        named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        shown_fields = ", ".join(
            f"{name} {getattr(params, name):g}"
            for name in named
            if getattr(params, name) != SamplingParams.__dataclass_fields__[name].default
        )
        terminal.note(f"Sampling where a request says nothing: {shown_fields}.")
    if engine.adapters:
        terminal.note(f"Adapters beside {engine.name}: {', '.join(engine.adapters)}.")
    terminal.note(f"A page to chat on: {url.removesuffix('v1')}")
    terminal.note_as_is(page.curl(url, has_key=has_key))
    terminal.note_as_is(page.sdk(url, has_key=has_key))
