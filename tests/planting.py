"""Planted faults: a test names a fault that it must find, and `pytest --plant` runs it with that fault in place.

    @catches("clients do not take turns", "mlxspec.server.http.fairness:Lane._next", lambda right: first_come)
    def test_clients_take_turns_in_a_lane() -> None: ...

A fault is found by name, `module:attribute` or `module:Class.attribute`, and replaces that attribute by what its function makes of the
right one. A function is replaced in every module that has imported it. Without --plant the mark does nothing. With it, only marked tests
run, once for each of their faults, and pass if the test fails: by an assertion, by pytest, or by an error that the mark allows. A fault
that no case of its test runs with, and one whose stand-in cannot be called as the right one is, end the collection.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """name: a sentence. target: see the module. wrong: the right attribute -> the faulty one. case: text that the id of a case, as it is
    without --plant, must hold; empty: every case must find it. errors: what else counts as found, beside failed assertions."""

    name: str
    target: str
    wrong: Callable[[Any], Any]
    case: str = ""
    errors: tuple[type[BaseException], ...] = ()

    def place(self) -> tuple[Any, str, Any]:
        """The object that has the attribute, the attribute's name, and what is there. Raises AttributeError where nothing is."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner: Any = import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        return owner, name, inspect.getattr_static(owner, name)

    def runs_in(self, item: pytest.Item) -> bool:
        """Return whether this case of a test is to find the fault."""
        return self.case in item.name.replace(f"[{self.name}-", "[").replace(f"[{self.name}]", "")

    def misfit(self) -> str | None:
        """Return why the stand-in cannot be called as the right one is, None where it can."""
        try:
            right, wrong = map(_function, (self.place()[2], self.wrong(self.place()[2])))
        except ValueError as error:
            return f"{self.name}: {error}"
        try:
            parameters = inspect.signature(right).parameters.values() if callable(right) else ()
            called = inspect.signature(wrong) if callable(wrong) else None
        except (TypeError, ValueError):  # of a function in C nothing is known
            return None
        if called is None or not callable(right):
            return None
        needed = [p for p in parameters if p.default is p.empty]
        places = [p.name for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = {p.name: None for p in needed if p.kind is p.KEYWORD_ONLY}
        try:
            called.bind(*places, **names)
        except TypeError as error:
            return f"{self.name}: its stand-in cannot be called as {self.target} is: {error}"
        return None

    @contextmanager
    def planted(self) -> Iterator[None]:
        owner, name, right = self.place()
        wrong = self.wrong(right)
        places = [(owner, name)]
        if inspect.ismodule(owner) and callable(right):
            for module in list(sys.modules.values()):
                if module is not None and module is not owner and vars(module).get(name) is right:
                    places.append((module, name))
        with pytest.MonkeyPatch.context() as patch:
            for place, attribute in places:
                patch.setattr(place, attribute, wrong)
            yield


def catches(
    name: str,
    target: str,
    wrong: Callable[[Any], Any],
    *,
    case: str = "",
    errors: tuple[type[BaseException], ...] = (),
) -> pytest.MarkDecorator:
    return pytest.mark.catches(Fault(name, target, wrong, case, errors))


def rewritten(old: str, new: str) -> Callable[[Any], Any]:
    """Return a maker of stand-ins for `catches`: functions, methods and properties of the package whose text has `new` in the place of
    `old`. So a fault may be a bound that is off by one or a line that is missing. Making one raises ValueError where the right text does
    not hold `old` exactly once. A function that calls `super()` cannot be made so."""

    def wrong(right: Any) -> Any:
        function = inspect.unwrap(_function(right))
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(old) != 1:
            raise ValueError(f"{function.__qualname__} holds {old!r} {text.count(old)} times, not once")
        made: dict[str, Any] = {}
        code = compile(text.replace(old, new), f"<{function.__qualname__} with a fault>", "exec")
        exec(code, function.__globals__, made)
        return made[function.__name__]

    return wrong


def faults_of(item: pytest.Item) -> list[Fault]:
    return [mark.args[0] for mark in item.iter_markers("catches")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", action="store_true", help="run tests with the faults that they must find")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Planting() if config.getoption("--plant") else Unplanted(), "faults")


def unfindable(pairs: Sequence[tuple[Fault, pytest.Item]]) -> list[str]:
    """Return a sentence on each fault that no run could find: no case of its test is to find it, or its stand-in cannot be called as the
    right one is. pairs: faults with the cases of their tests."""
    every = {(fault.name, item.location[0]): fault for fault, item in pairs}
    run = {(fault.name, item.location[0]) for fault, item in pairs if fault.runs_in(item)}
    found = [
        f"{name} ({file}): no case holds {every[name, file].case!r}"
        for name, file in sorted(set(every) - run)
    ]
    return found + [sentence for fault in every.values() if (sentence := fault.misfit()) is not None]


class Unplanted:
    """What is known of the faults of a run without --plant. pairs: faults with the collected cases of their tests, before others are
    deselected."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Fault, pytest.Item]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.pairs = [(m.args[0], item) for item in items for m in item.iter_markers("catches")]


class Planting:
    """What --plant does."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        faults = [mark.args[0] for mark in metafunc.definition.iter_markers("catches")]
        if faults:
            metafunc.fixturenames.insert(0, "planted_fault")
            metafunc.parametrize("planted_fault", faults, ids=lambda f: f.name, indirect=True)

    @pytest.fixture
    def planted_fault(self, request: pytest.FixtureRequest) -> Fault:
        return request.param

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        fault = _of(item)
        if fault is None:
            return (yield)
        with fault.planted():  # before any fixture of the test
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if (fault := _of(item)) is not None and fault.runs_in(item)]
        wrong = unfindable([(fault, item) for item in items if (fault := _of(item)) is not None])
        if wrong:
            raise pytest.UsageError("Planted faults that cannot be found:\n" + "\n".join(wrong))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Any:
        fault = _of(pyfuncitem)
        if fault is None:
            return (yield)
        try:
            yield
        except BaseException as error:
            if not _shows(error, fault.errors):
                raise
            return True
        raise AssertionError(f"the fault was not found: {fault.name}")


def _function(found: Any) -> Any:
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found.fget if isinstance(found, property) else found


def _of(item: pytest.Item) -> Fault | None:
    return item.callspec.params.get("planted_fault") if hasattr(item, "callspec") else None


def _shows(error: BaseException, errors: tuple[type[BaseException], ...]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_shows(e, errors) for e in error.exceptions)
    return isinstance(error, (AssertionError, pytest.fail.Exception, *errors))
