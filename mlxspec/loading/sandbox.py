"""Runs untrusted Jinja templates: without access to Python, and with bounds on time and memory.

Jinja's sandbox keeps a template away from Python's internals. But a template can still compute for ever (`10 ** 10 ** 10`, nested loops)
and fill
the memory (a text that doubles, a list that contains itself twice). So every step that can repeat checks a clock of computing time, and
every
value that a step makes is measured: its characters and items, nested ones included, counted as often as printing them would.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

HEAVIEST = 16 << 20  # characters and items of a value
SECONDS = 2.0  # of computing, a rendering
LONGEST = 1 << 18  # characters of a template; those of published models have 20 thousand
_BITS = 4096  # of an integer
_WIDEST = 9999  # characters that formats pad to

_TEXT_METHODS = frozenset(
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill".split()
)
_PADDING = ("center", "ljust", "rjust", "zfill")
_NUMBERED = ("indent", "round", "tojson", "truncate")
_NO_FILTERS = ("batch", "center", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{5}|\d*\.(?:\*|\d{5}))")
_WIDE_BRACES = re.compile(r":[^{}]*(?:\d{5}|\{)")


class RenderBudget(threading.local):
    """What a rendering may still do. One a thread: templates render side by side."""

    deadline: float | None = None
    known: Mapping[int, int] = {}

    def __init__(self) -> None:
        self.recent: deque[tuple[Any, int]] = deque(maxlen=8)  # containers made of late, and their weights


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates end. Render inside `budget`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        # folding constants would compute them while compiling
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False)
        self._budget = RenderBudget()
        self.finalize = self._printable
        self.concat = self._concat  # type: ignore[assignment, method-assign]
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded(name, function)

    def _generate(self, source: nodes.Template, *more: Any, **options: Any) -> str:
        return super()._generate(_Metered(self).visit(source), *more, **options)

    @contextmanager
    def budget(self, values: Iterable[Any]) -> Iterator[None]:
        """Time and weights for one rendering of `values`, which stay alive and unchanged meanwhile."""
        known: dict[int, int] = {}
        for value in values:
            _weigh(value, known, {})
        self._budget.known, self._budget.deadline = known, time.thread_time() + SECONDS
        try:
            yield
        finally:
            self._budget.known, self._budget.deadline = {}, None
            self._budget.recent.clear()

    def tick(self) -> str:
        """A step. Raises SecurityError when there were too many."""
        deadline = self._budget.deadline
        if deadline is not None and time.thread_time() > deadline:
            raise SecurityError(f"it computes for more than {SECONDS:.0f} seconds")
        return ""

    def weighed(self, value: Any) -> Any:
        """The value. Raises SecurityError for one that is too heavy."""
        if isinstance(value, int) and not isinstance(value, bool):
            if value.bit_length() > _BITS:
                raise SecurityError(f"it computes with integers of more than {_BITS} bits")
        elif isinstance(value, (str, bytes)):
            _check_weight(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self._weight(value)
        return value

    def _weight(self, value: Any) -> int:
        for other, weight in self._budget.recent:
            if other is value:
                return weight
        weight = _weigh(value, {}, self._budget.known)
        self._budget.recent.append((value, weight))
        return weight

    # --- what templates do

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "+" and isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
            _check_weight(len(left) + len(right))
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            weight = self._weight(left) + self._weight(
                right
            )  # without walking over a list that grows step by step
            _check_weight(weight)
            both = super().call_binop(context, operator, left, right)
            self._budget.recent.append((both, weight))
            return both
        elif operator == "%":
            _check_format(left, _WIDE_PERCENT)
        return self.weighed(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner = getattr(function, "__self__", None)
        if owner is self:
            return function(*args)
        self.tick()
        args = tuple(map(self._gathered, args))
        if isinstance(owner, str):
            _check_method(owner, function.__name__, args)
        elif isinstance(owner, (bytes, int, float, complex)):
            raise SecurityError(f"it calls {type(owner).__name__}.{function.__name__}")
        return self.weighed(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__, _WIDE_BRACES)
        return wrapped

    def join_texts(self, *parts: Any) -> str:
        """The operator `~`."""
        self.tick()
        return self._concat([str(self._printable(p)) for p in parts])

    def _gathered(self, value: Any) -> Any:
        """What `map` and its kind would make one by one, as a list."""
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            return value
        found, weight = [], 0
        for item in value:
            self.tick()
            weight += _weigh(item, {}, self._budget.known)
            _check_weight(weight)
            found.append(item)
        return found

    def _concat(self, parts: Iterable[str]) -> str:
        found = list(parts)
        _check_weight(sum(map(len, found)))
        return "".join(found)

    def _printable(self, value: Any) -> Any:
        if isinstance(value, Namespace):
            raise SecurityError("it prints a namespace")
        return self.weighed(value)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is a step, and whose outcome is weighed. The wrapper passes on what Jinja gives, context and all."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            args = tuple(map(self._gathered, args))
            _check_filter(name, args[skipped:], kwargs)
            return self.weighed(function(*args, **kwargs))

        return run


class _Metered(NodeTransformer):
    """Puts a step into every loop, and hands to the sandbox what Jinja would do by itself: texts joined, lists and dicts made."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._placed(nodes.ExprStmt(_call("tick", [])), node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._placed(_call("join_texts", node.nodes), node)

    def _made(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return self._placed(_call("weighed", [node]), node)

    visit_List = visit_Dict = visit_Tuple = _made

    def _placed(self, made: nodes.Node, where: nodes.Node) -> nodes.Node:
        """`made` in the line of `where`, for messages."""
        return made.set_lineno(where.lineno).set_environment(self._sandbox)


def _call(name: str, args: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _weigh(value: Any, own: dict[int, int], known: Mapping[int, int]) -> int:
    """Characters and items, as often as printing would show them. own: weights of containers on the way; known: of those that stay.
    Raises SecurityError."""
    if isinstance(value, (str, bytes)):
        weight = len(value) + 1
    elif isinstance(value, (list, tuple, dict)):
        place = id(value)
        found = own.get(place, known.get(place))
        if found is not None:
            return found
        own[place] = HEAVIEST + 1  # until it is known: what holds itself has no end
        parts = value if not isinstance(value, dict) else (x for pair in value.items() for x in pair)
        weight = 1
        for part in parts:
            weight += _weigh(part, own, known)
            if weight > HEAVIEST:
                break
        own[place] = weight
    elif isinstance(value, Namespace):
        raise SecurityError("it puts a namespace into a list or a dict")
    else:
        weight = 1
    _check_weight(weight)
    return weight


def _check_weight(weight: int) -> None:
    if weight > HEAVIEST:
        raise SecurityError(
            f"it makes a text or a list of more than {HEAVIEST >> 20} million characters or items"
        )


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _BITS:
        raise SecurityError(f"it computes with integers of more than {_BITS} bits")


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
            _check_weight(len(sequence) * max(0, times))


def _check_format(text: Any, wide: re.Pattern[str]) -> None:
    if isinstance(text, str) and wide.search(text):
        raise SecurityError(f"it pads a text to more than {_WIDEST} characters, or to a width it computes")


def _check_width(width: Any) -> None:
    if isinstance(width, int) and width > _WIDEST:
        raise SecurityError(f"it pads a text to more than {_WIDEST} characters")


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name not in _TEXT_METHODS:
        raise SecurityError(f"it calls str.{name}")
    if name in _PADDING and args:
        _check_width(args[0])
    elif name == "replace":
        _check_replacement(owner, args)
    elif name == "join" and args and isinstance(args[0], Sized):
        _check_weight(sum(len(p) + len(owner) for p in args[0] if isinstance(p, str)))  # type: ignore[attr-defined, misc]


def _check_replacement(text: str, args: tuple[Any, ...]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_weight(len(text) + text.count(args[0]) * len(args[1]))


def _check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Of what a filter is given, before it runs."""
    value, *rest = args or (None,)
    if name in _NUMBERED:
        for number in (*rest, *kwargs.values()):
            _check_width(abs(number) if isinstance(number, int) else 0)
    if name == "format":
        _check_format(value, _WIDE_PERCENT)
    elif name == "replace":
        _check_replacement(str(value), tuple(map(str, rest)))
    elif name == "sum" and not isinstance(rest[1] if len(rest) > 1 else kwargs.get("start", 0), (int, float)):
        raise SecurityError("it adds up what are no numbers")
    elif name == "indent":
        width = rest[0] if rest else kwargs.get("width", 4)
        _check_weight((str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))
    elif name == "join" and isinstance(value, Sized):
        _check_weight(len(value) * len(str(rest[0] if rest else kwargs.get("d", ""))))
