"""Values out of a config.json, judged as they are read. A config class of ours is the table of what is read: each of its fields names its
key, its kind and its default (`size`, `number`, `flag`), and `read` fills them. Knows bounds; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from mlxspec.errors import ModelError

WIDEST = 1 << 24  # outputs of one projection
_MOST = {
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers", "num_layers"), 1024),
    "num_kv_shared_layers": 1024,
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 16,
    "num_experts": 1 << 14,
    "max_pixels": 1 << 32,
    "longest_edge": 1 << 32,
}


_PLAIN = {  # by the way to read them, keys that every architecture spells alike
    "size": (
        "hidden_size",
        "max_position_embeddings",
        "n_layer",
        "n_layers",
        "num_hidden_layers",
        "num_layers",
        "vocab_size",
    ),
    "number": ("rms_norm_eps", "rope_theta"),
    "flag": ("tie_word_embeddings",),
}
# What every config.json may hold: who wrote it and how, training, generation (which generation_config.json or a request decides), labels.
EVERYWHERE = frozenset(
    """
    _attn_implementation _commit_hash _experts_implementation _name_or_path add_cross_attention architectures attention_dropout
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range
    is_decoder label2id length_penalty max_length min_length model_file model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
# Tensors, and not these, tell how a folder is quantized; towers of other senses are not read.
AROUND = frozenset({"quantization", "quantization_config", "vision_config", "audio_config", "text_config"})


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of an object that are accepted without being read. idle: keys without an effect on text. only: for some keys the values that
    are supported, in addition to null; other values would need what is not implemented."""

    idle: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __or__(self, other: Keys) -> Keys:
        return Keys(idle=self.idle | other.idle, only={**other.only, **self.only})


def short(value: Any) -> str:
    """Return a config value as text of at most 80 characters, for a message."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under `key` of a config.json, empty where there is none. Raises ModelError where the value is not an object."""
    found = values.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ModelError(f"{key} in config.json is not an object.")
    return found


def check_plain(config: Mapping[str, Any]) -> None:
    """Check the keys of a config.json that every architecture spells alike, for models whose other keys are read by others' code. A list,
    as of a number for each layer, is not checked. Raises ModelError that names the key."""
    for part in (config, mapping(config, "text_config")):
        get = Values(part)
        for how, keys in _PLAIN.items():
            for key in keys:
                if get.value(key) is not None and not isinstance(part[key], list):
                    getattr(get, how)(key)


class Values:
    """A JSON object whose numbers, flags and choices are checked as they are read. Every method raises ModelError that names the key; null
    counts as absent. asked: the keys that have been read. parts: inner objects that are read key by key too."""

    def __init__(
        self, values: Mapping[str, Any], keys: Keys | None = None, file: str = "config.json"
    ) -> None:
        """Wrap `values`. keys: those that are accepted without being read. file: the name of the file in messages. Raises ModelError where
        a key of `keys.only` has a value that is not supported."""
        self.raw, self.keys, self.file = values, keys or Keys(), file
        self.asked: set[str] = set()
        self.parts: list[Values] = []
        for key, allowed in self.keys.only.items():
            self.only(key, *allowed)

    def value(self, key: str, default: Any = None) -> Any:
        """Return the unchecked value of `key`, or `default` where it is absent or null."""
        self.asked.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def skip(self, *keys: str) -> None:
        """Mark these keys as read, as they add nothing to what has been read."""
        self.asked.update(keys)

    def object(self, key: str) -> Mapping[str, Any]:
        """Return the object under `key`, empty where there is none."""
        self.asked.add(key)
        return mapping(self.raw, key)

    def part(self, key: str, keys: Keys) -> Values:
        """Return the object under `key` as Values. keys: those in it that are accepted without being read."""
        self.parts.append(Values(self.object(key), keys, self.file))
        return self.parts[-1]

    def size(self, key: str, default: int | None = None) -> int:
        """Return the integer under `key`: at least 1 (0 where the default is 0) and at most a plausible bound."""
        value = self.value(key, default)
        low = 0 if default == 0 else 1
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not low <= value <= _MOST.get(key, 1 << 24)
        ):
            raise ModelError(f"{self.file}: {key} is {short(value)}, which is no usable size.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number under `key`, which must be above 0 and below 1e12."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise ModelError(f"{self.file}: {key} is {short(value)}, which is no usable number.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.file}: {key} is {short(value)}, which is neither true nor false.")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Check that the value of `key` is absent or one of `allowed`, as other values need what is not implemented. Raises ModelError."""
        value = self.value(key)
        if value is not None and not any(
            value is a or (value == a and type(value) is type(a)) for a in allowed
        ):
            raise ModelError(f"{self.file}: {key} {short(value)} is not supported.")

    def unread(self) -> tuple[str, ...]:
        """Return the keys, here and in `parts`, that have a value and that nothing has read. Keys that are null, false or empty are left
        out."""
        known = self.keys.idle | self.asked
        own = {k for k, v in self.raw.items() if k not in known and v not in (None, False, "", [], {})}
        return tuple(sorted(own.union(*(part.unread() for part in self.parts))))


def text_part(config: Mapping[str, Any], keys: Keys, around: Keys) -> tuple[Values, Values]:
    """Return the values of a config.json and of its `text_config`; twice the same object where there is no `text_config`. keys: accepted
    keys of the text part; around: accepted keys of the outer part."""
    if not mapping(config, "text_config"):
        both = Values(config, keys | around)
        return both, both
    outer = Values(config, around)
    return outer, outer.part("text_config", keys)


def flattened(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the keys of several objects of a config.json as one object. names: the keys of these objects; "" means config.json's own keys.
    Later objects override earlier ones, but not by null."""
    own = {key: value for key, value in config.items() if key not in names}
    parts = [mapping(config, name) if name else own for name in names]
    return {key: value for part in parts for key, value in part.items() if value is not None}


def layer_kinds(get: Values, kind: str, interval: int = 1) -> tuple[bool, ...]:
    """Return for each layer whether it is of `kind` (true) or has full attention (false): by `layer_types`, or else false for every
    `interval`-th layer. Raises ModelError."""
    num_layers, named = get.size("num_hidden_layers"), get.value("layer_types")
    if named is None:
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    known = {kind: True, "full_attention": False}
    is_list = isinstance(named, list) and all(isinstance(k, str) and k in known for k in named)
    if not is_list or len(named) != num_layers:
        raise ModelError(f"config.json: layer_types must name {' or '.join(known)} once a layer.")
    return tuple(known[k] for k in named)


# --- fields of config classes


def size(key: str | None = None, default: int | None = None) -> Any:
    """Return a dataclass field that `read` fills by `Values.size`. key: in config.json; None: the field's name. default: used where neither
    config.json nor a caller gives the value; None: one of them must give it."""
    return _field("size", key, default)


def number(key: str, default: float | None = None) -> Any:
    """Return a dataclass field that `read` fills by `Values.number`. Parameters are those of `size`."""
    return _field("number", key, default)


def flag(key: str | None = None, default: bool = False) -> Any:
    """Return a dataclass field that `read` fills by `Values.flag`. Parameters are those of `size`."""
    return _field("flag", key, default)


def _field(kind: str, key: str | None, default: Any) -> Any:
    return field(default=MISSING if default is None else default, metadata={"read": (kind, key, default)})


Config = TypeVar("Config")


def read(kind: type[Config], get: Values, whole: Values | None = None, **given: Any) -> Config:
    """Return a config object of the class `kind`, whose fields are read from `get` or given by name in `given`. whole: the object whose
    keys that nothing has read go into the field `unread`; None: no such field. Raises ModelError naming the first key that is missing or
    out of range."""
    names = {f.name: f.metadata["read"] for f in fields(kind) if "read" in f.metadata and f.name not in given}  # type: ignore[arg-type]
    found = {name: getattr(get, how)(key or name, default) for name, (how, key, default) in names.items()}
    if whole is not None:
        given["unread"] = whole.unread()
    return kind(**found, **given)
