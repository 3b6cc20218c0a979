"""Makes a checked Request from a caller's arguments: token ids, options, marks. Runs no model.

Marks are places in a prompt up to which a later prompt may share its beginning: the ends of the system prompt and of each turn. Where a
caller gives none, the places after the tokens that end a turn are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mlxspec.config import ALWAYS_THERE, READ_AT_LOAD, SamplingParams, SpecConfig
from mlxspec.engine.calls import Prompt
from mlxspec.engine.image_prompt import NO_IMAGES, PromptWithImages, row_images
from mlxspec.engine.request import Request
from mlxspec.errors import ConfigError, ContextOverflowError, ImageError
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.image_features import HeldFeatures, ImageFeatures
from mlxspec.models.image_rows import SeenImages
from mlxspec.models.vision.base import Vision
from mlxspec.option import check_number, shown
from mlxspec.sampling.constraints import Compiled, ConstraintMaker

LONGEST_DEADLINE = 7 * 24 * 3600.0  # seconds


class RequestFactory:
    """A maker of checked requests for one model. adapters: names of those that a request may use. max_context: the engine's, in tokens.
    drafters: names of those that were loaded. spec: for requests without one."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_context: int,
        drafters: Iterable[str],
        spec: SpecConfig,
        *,
        vision: Vision | None = None,
        features: ImageFeatures | None = None,
        no_images: str = NO_IMAGES,
    ) -> None:
        """Make a factory. vision, features: of a model that reads images, else None. no_images: the sentence why it reads none. Raises
        ConfigError where spec names a drafter that was not loaded."""
        self._vision, self.features, self._no_images = vision, features, no_images
        self.tokenizer = tokenizer
        self.vocab_size, self.max_context = vocab_size, max_context
        self._drafters, self._spec = tuple(drafters), spec
        self._check_drafters(spec)
        self.adapters: tuple[str, ...] = ()
        self.constraints = ConstraintMaker(tokenizer, vocab_size)
        self._num_requests = 0

    def new_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        spec: SpecConfig | None,
        *,
        marks: Iterable[int] | None = None,
        deadline: float | None = None,
        compiled: Compiled | None = None,
        client: str = "",
        number: int | None = None,
    ) -> Request:
        """Check the parts of a request and return the request. marks, deadline, compiled, client: as in `Engine.submit`. number: the
        number that rank 0 gave it; None: the next one. Raises ConfigError, GrammarError, ContextOverflowError and ImageError for
        parts that cannot be used."""
        params = SamplingParams() if params is None else params
        spec = self._spec if spec is None else spec
        if not isinstance(params, SamplingParams) or not isinstance(spec, SpecConfig):
            raise ConfigError("Options of a request are given as SamplingParams and SpecConfig.")
        if spec.policy is None:
            spec = replace(spec, policy=self._spec.policy)
        self._check_drafters(spec)
        if spec.predicted:
            spec = replace(spec, predicted=self._predicted(spec.predicted))
        if self.tokenizer is None and params.stop:
            raise ConfigError("Without a tokenizer there are no stop strings.")
        if deadline is not None:
            check_number("deadline", deadline, 0, LONGEST_DEADLINE)
        seen = None
        if isinstance(prompt, PromptWithImages):
            tokens = self._tokens(prompt.tokens)
            seen = self._seen(prompt, spec.owner)
        else:
            tokens = self._tokens(prompt)
        if len(tokens) >= self.max_context:
            raise ContextOverflowError(len(tokens), self.max_context)
        places = self._marks(tokens, marks)
        tokens = tokens if seen is None else seen.images.keyed(tokens)
        if number is None:
            number, self._num_requests = self._num_requests, self._num_requests + 1
        return Request(
            number,
            tokens,
            params,
            spec,
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            maker=self.constraints,
            marks=places,
            deadline=deadline,
            compiled=compiled,
            client=client,
            seen=seen,
            scales=self._scales(params.adapters),
        )

    def _scales(self, asked: Mapping[str, float]) -> tuple[float, ...]:
        """Return the scale of each loaded adapter for a request; () where it uses none. asked: scales by adapter's name. Raises
        ConfigError for an adapter that was not loaded."""
        for name in asked:
            if name not in self.adapters:
                there = ", ".join(self.adapters) or "none"
                raise ConfigError(
                    f"The adapter {shown(name)} was not loaded with this model; loaded are: {there}."
                )
        return tuple(asked.get(name, 0.0) for name in self.adapters) if any(asked.values()) else ()

    def _seen(self, prompt: PromptWithImages, owner: str) -> SeenImages:
        """Return the images of a prompt with their source of image rows. owner: of the request; image rows are shared only within an
        owner. Raises ImageError where the model reads no images."""
        if self._vision is None or self.features is None:
            raise ImageError(self._no_images)
        held = HeldFeatures(self.features, owner)
        return SeenImages(row_images(prompt, self._vision), held, held.__contains__, owner)

    def _predicted(self, given: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the checked token ids of a request's prediction of its answer. Raises ConfigError."""
        if isinstance(given, str):
            if self.tokenizer is None:
                raise ConfigError("Without a tokenizer predicted must be token ids.")
            given = tuple(self.tokenizer.encode(given, special=False))
        if len(given) > self.max_context:
            raise ConfigError(
                f"The predicted text has {len(given)} tokens, more than an answer can have: the context ends at {self.max_context}."
            )
        bad = [t for t in given if t >= self.vocab_size]
        if bad:
            raise ConfigError(f"predicted holds {self._named(bad[0])} (0 to {self.vocab_size - 1}).")
        return given

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Return the checked token ids of a prompt. Raises ConfigError."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("Without a tokenizer a prompt must be token ids.")
            prompt = self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise ConfigError(f"A prompt is a string or a list of token ids, not {type(prompt).__name__}.")
        if not prompt:
            raise ConfigError("The prompt is empty.")
        size = self.vocab_size
        bad = [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < size]
        if bad:
            raise ConfigError(f"The prompt holds {self._named(bad[0])} (0 to {size - 1}).")
        return [int(t) for t in prompt]

    def _named(self, token: object) -> str:
        """Return a phrase for an error message that names a token which the model cannot read, and why it cannot."""
        text = None
        if (
            self.tokenizer is not None
            and isinstance(token, int)
            and not isinstance(token, bool)
            and token >= 0
        ):
            text = self.tokenizer.token_text(token)
        if text is None:
            return f"{shown(token)}, which is no token id of this model"
        return f"the token {shown(text)}, whose id {token} is beyond the rows of this model"

    def _marks(self, tokens: Sequence[int], marks: Iterable[int] | None) -> tuple[int, ...]:
        if marks is None:
            ends = self.tokenizer.eos_ids if self.tokenizer is not None else frozenset()
            return tuple(i + 1 for i, token in enumerate(tokens) if token in ends)
        found = sorted(set(marks))
        for mark in found:
            check_number("A mark", mark, 0, len(tokens), integer=True)
        return tuple(found)

    def _check_drafters(self, spec: SpecConfig) -> None:
        for name in spec.drafters:
            if name not in ALWAYS_THERE and name not in self._drafters:
                there = ", ".join(("suffix", *self._drafters))
                raise ConfigError(f"The drafter {name} was not loaded with this model; loaded are: {there}.")
        for name in READ_AT_LOAD:
            asked, loaded = getattr(spec, name), getattr(self._spec, name)
            is_other = asked > loaded if name == "ngram_m" else asked != loaded  # less of ngram_m is honoured
            if is_other and asked != getattr(SpecConfig, name):
                raise ConfigError(
                    f"{name} cannot be {shown(asked)} for one request: it is read when a model is loaded, and was {shown(loaded)} then."
                )
