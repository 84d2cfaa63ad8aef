"""Public docstrings against signatures, raised errors, the stub and running examples."""

import ast
import doctest
import importlib
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from shmbus_ext import _core

ROOT = Path(__file__).resolve().parents[2]
STUBS = [ROOT / "shmbus_ext" / name for name in ("_public.pyi", "_public_put.pyi")]

MODULES = [
    "shmbus",
    "trainer_adapter",
    "trainer_adapter.attention",
    "trainer_adapter.adapters.trl",
    "trainer_adapter.advantages",
    "trainer_adapter.logprobs",
    "trainer_adapter.losses",
    "trainer_adapter.compat",
    "trainer_adapter.microbatch",
    "trainer_adapter.balance",
    "shmbus.weights",
    "shmbus.tensors",
    "shmbus.batch.gather",
]

#: Errors raised by C functions themselves, beside a caller's own code.
RAISED_IN_C = {
    "Producer.put": {
        "TypeError", "ValueError", "RecordTooLargeError", "BusFullError", "BusClosedError",
        "BusRemovedError", "StallError",
    },
    "Producer.put_many": {
        "TypeError", "ValueError", "RecordTooLargeError", "BusFullError", "BusClosedError",
        "BusRemovedError", "StallError",
    },
    "Producer.cancelled": {"TypeError", "ValueError", "BusClosedError"},
    "Reservation.resize": {"KeyError", "ValueError", "BusClosedError"},
    "Reservation.commit": {"BusClosedError"},
    "Reservation.abort": {"BusClosedError"},
    "Trajectory.keys": set(),
    "Trajectory.get": {"BusClosedError", "TypeError"},
    "Trajectory.shape": {"KeyError"},
    "Trajectory.items": {"BusClosedError", "TypeError"},
    "Trajectory.values": {"BusClosedError", "TypeError"},
    "Trajectory.copy": {"BusClosedError", "TypeError"},
    "Trajectory.to_dict": {"BusClosedError", "TypeError"},
    "Group.make": {"TypeError"},
    "Consumer.take": {"ProtocolError", "StallError", "BusClosedError"},
}  # fmt: skip

#: Classes never made by users, with their makers.
MADE_BY_OTHERS = {
    "Bus": "Bus.create and Bus.open",
    "Publication": "WeightPublisher.publish_async",
    "SharedModel": "share_model and attach_model",
    "StepItem": "TensorReceiver.recv",
    "TensorReceiver": "TensorChannel.open",
    "TensorSender": "TensorChannel.create",
    "WeightSource": "a protocol",
    "Weights": "WeightSubscriber.latest",
}

_HEADING = re.compile(r"^(\w[\w ]*)\n-+$", re.M)


def sections(docstring: str) -> dict[str, str]:
    """The NumPy sections of a docstring by heading; the text before the first is under ""."""
    found: dict[str, str] = {}
    heading, begin = "", 0
    for match in _HEADING.finditer(docstring):
        found[heading] = docstring[begin : match.start()]
        heading, begin = match[1], match.end()
    found[heading] = docstring[begin:]
    return found


def entries(section: str) -> list[str]:
    """Names explained by a section: "a, b : int" gives a and b."""
    heads = re.findall(r"^(\S.*)$", section, re.M)
    names = [name.strip() for head in heads for name in head.split(" : ")[0].split(",")]
    return [name.rpartition(".")[2].lstrip("*") for name in names if name]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("shmbus", "shmbus_ext", "trainer_adapter")


def is_data(kind: type) -> bool:
    """Whether fields equal parameters: a Struct, a dataclass, a NamedTuple, an exception."""
    return (
        issubclass(kind, BaseException)
        or hasattr(kind, "__struct_fields__")
        or hasattr(kind, "__dataclass_fields__")
        or hasattr(kind, "_fields")
    )


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of a class and its bases here, each by its first definition."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not is_ours(base.__module__):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
                yield name, member


def documented() -> dict[str, Any]:
    """Every public callable and property, by its name for users."""
    found: dict[str, Any] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or not hasattr(value, "__module__"):
                continue
            if not is_ours(value.__module__):
                continue
            found[value.__name__] = value
            if inspect.isclass(value):
                found |= {
                    f"{value.__name__}.{member_name}": member
                    for member_name, member in public_members(value)
                }
    return found


DOCUMENTED = documented()


def stub_functions() -> dict[str, ast.FunctionDef]:
    classes = {
        node.name: node
        for stub in STUBS
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    alone = {
        node.name: node
        for stub in STUBS
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    users = {"Writer": "Producer", "GroupBase": "Group", "ConsumerBase": "Consumer"}
    return alone | {
        f"{users.get(name, name)}.{node.name}": node
        for name, kind in classes.items()
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


STUB_FUNCTIONS = stub_functions()


def unwrapped(value: Any) -> Any:
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def parameters(name: str, value: Any) -> list[str]:
    if name in STUB_FUNCTIONS and not isinstance(unwrapped(value), FunctionType):
        arguments = STUB_FUNCTIONS[name].args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        extra = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
        names = [each.arg for each in (*every, *extra)]
    else:
        names = list(inspect.signature(unwrapped(value)).parameters)
    return [each for each in names if each not in ("self", "cls")]


def returns_something(name: str, value: Any) -> bool:
    if name in STUB_FUNCTIONS and not isinstance(unwrapped(value), FunctionType):
        node = STUB_FUNCTIONS[name].returns
        return node is not None and ast.unparse(node) != "None"
    annotation = inspect.signature(unwrapped(value)).return_annotation
    return annotation not in (None, "None", "NoReturn", inspect.Signature.empty)


def raised(value: Any) -> set[str]:
    """Types raised in its own body, without its callees."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(unwrapped(value))))
    except (OSError, TypeError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(kind).rpartition(".")[2]
            if name[:1].isupper():
                found.add(name)
    return found


def fields_of(kind: type) -> list[str]:
    for name in ("__struct_fields__", "__dataclass_fields__", "_fields"):
        if fields := getattr(kind, name, None):
            return list(fields)
    return []


def docstring_of(value: Any) -> str:
    """A docstring, or the docstring of a named callable: "as `WeightSource.iter_local` does"."""
    text = inspect.cleandoc(inspect.getdoc(unwrapped(value)) or "")
    same = re.fullmatch(r".*\bas `(\w+\.\w+)` does\.", text)
    return text if same is None else docstring_of(DOCUMENTED[same[1]])


def report(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def test_each_public_callable_has_a_docstring() -> None:
    assert len(DOCUMENTED) > 80
    report([name for name, value in DOCUMENTED.items() if not docstring_of(value)])


def blocking_form(name: str) -> str | None:
    """The blocking twin of a coroutine: `put` of `aput`."""
    kind, _, method = name.rpartition(".")
    sibling = f"{kind}.{method[1:]}"
    return sibling if method.startswith("a") and sibling in DOCUMENTED else None


def test_a_coroutine_takes_what_its_blocking_form_takes_and_says_which_it_is() -> None:
    forms = {name: form for name in DOCUMENTED if (form := blocking_form(name)) is not None}
    assert {"Producer.aput", "Consumer.atake"} <= forms.keys()
    offences = []
    for name, form in forms.items():
        taken = set(parameters(name, DOCUMENTED[name])) - {"arguments"}
        if more := taken - set(parameters(form, DOCUMENTED[form])):
            offences.append(f"{name}: {form} does not take {sorted(more)}")
        text = docstring_of(DOCUMENTED[name])
        if f"`{form.rpartition('.')[2]}`" not in text or "CancelledError" not in text:
            offences.append(f"{name}: expected its form, and what a CancelledError leaves")
    report(offences)


def callables() -> Iterator[tuple[str, Any]]:
    """Callables without properties and coroutine twins; a class stands for its constructor."""
    for name, value in DOCUMENTED.items():
        if isinstance(value, property) or (inspect.isclass(value) and is_data(value)):
            continue
        if name in MADE_BY_OTHERS or blocking_form(name) is not None:
            continue
        if inspect.isclass(value) and value.__init__ is object.__init__:
            continue
        yield name, value


def test_parameters_are_those_of_the_signature() -> None:
    offences = []
    for name, value in callables():
        told = entries(sections(docstring_of(value)).get("Parameters", ""))
        taken = parameters(name, value)
        if sorted(told) != sorted(taken):
            offences.append(f"{name}: takes {taken}, Parameters has {told}")
    report(offences)


def test_attributes_are_the_fields() -> None:
    offences = []
    for name, value in DOCUMENTED.items():
        if not inspect.isclass(value) or not (fields := fields_of(value)):
            continue
        said = sections(docstring_of(value))
        told = entries(said.get("Attributes", "") + said.get("Parameters", ""))
        if missing := [each for each in fields if each not in told]:
            offences.append(f"{name}: {missing} unsaid")
    report(offences)


def test_what_is_returned_is_said() -> None:
    offences = []
    for name, value in callables():
        if inspect.isclass(value):
            continue
        text = docstring_of(value)
        told = bool({"Returns", "Yields"} & sections(text).keys())
        if not told and not parameters(name, value) and text.startswith("Return "):
            continue  # a sentence says everything
        if told != returns_something(name, value):
            offences.append(f"{name}: {'does not return' if told else 'returns'} something")
    report(offences)


def test_what_is_raised_is_said() -> None:
    offences = []
    for name, value in callables():
        source = value.__init__ if inspect.isclass(value) else value
        told = set(entries(sections(docstring_of(value)).get("Raises", "")))
        if missing := (RAISED_IN_C.get(name, set()) | raised(source)) - told:
            offences.append(f"{name}: raises {sorted(missing)} unsaid")
    report(offences)


def test_every_public_c_function_is_held_to_what_it_raises() -> None:
    assert {
        name
        for name, value in DOCUMENTED.items()
        if inspect.ismethoddescriptor(value)
        and not isinstance(value, (classmethod, staticmethod, property))
    } - {"Group.make"} <= RAISED_IN_C.keys()
    assert RAISED_IN_C.keys() <= DOCUMENTED.keys()


def test_the_stub_has_the_docstrings_and_parameters_of_the_c_code() -> None:
    offences = []
    for kind in (kind for stub in STUBS for kind in ast.parse(stub.read_text()).body):
        if not isinstance(kind, ast.ClassDef):
            continue
        runtime = getattr(_core, kind.name)
        if (said := ast.get_docstring(kind)) and said != inspect.cleandoc(runtime.__doc__):
            offences.append(f"{kind.name}: the stub has another docstring")
        for node in kind.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            method = getattr(runtime, node.name)
            if ast.get_docstring(node) != inspect.cleandoc(method.__doc__ or ""):
                offences.append(f"{kind.name}.{node.name}: the stub has another docstring")
            said_names = [
                each.arg
                for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if each.arg not in ("self", "cls")
            ] + ([node.args.kwarg.arg] if node.args.kwarg else [])
            names = [n for n in inspect.signature(method).parameters if n != "self"]
            if said_names != names:
                offences.append(f"{kind.name}.{node.name}: {said_names} in the stub, {names} in C")
    report(offences)


def test_an_attribute_of_a_c_class_says_what_its_class_says_of_it() -> None:
    offences = []
    held = 0
    for name in ("Trajectory", "GroupBase", "Reservation"):
        kind = getattr(_core, name)
        lines = sections(inspect.cleandoc(kind.__doc__))["Attributes"].strip().splitlines()
        said: dict[str, list[str]] = {}
        texts: list[str] = []
        for line in lines:
            if line.startswith(" "):
                texts.append(line.strip())
            else:
                texts = said[line.partition(" : ")[0]] = []
        for attribute, texts in said.items():
            held += 1
            if getattr(kind, attribute).__doc__ != " ".join(texts):
                offences.append(f"{name}.{attribute}")
    assert held > 20
    report(offences)


EXAMPLES = sorted(name for name, value in DOCUMENTED.items() if ">>>" in docstring_of(value))
#: Examples with a bus of their own; the rest use a handle of the reader's.
WHOLE_EXAMPLES = [name for name in EXAMPLES if "Bus.create(" in docstring_of(DOCUMENTED[name])]


def example_of(name: str, bus: str) -> doctest.DocTest:
    text = docstring_of(DOCUMENTED[name]).replace('"run1"', repr(bus))
    return doctest.DocTestParser().get_doctest(text, {}, name, str(ROOT), 0)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_python(name: str) -> None:
    for step in example_of(name, "run1").examples:
        compile(step.source, name, "single")


@pytest.mark.parametrize("name", WHOLE_EXAMPLES)
def test_whole_examples_run_and_give_what_they_say(name: str, bus_name: str) -> None:
    example = example_of(name, bus_name)
    told: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(told)


def test_a_wrong_docstring_is_found() -> None:
    text = (
        "Do it.\n\nParameters\n----------\na, b : int\n    Two.\n**rest\n    Others.\n\n"
        "Returns\n-------\nint\n"
    )
    assert entries(sections(text)["Parameters"]) == ["a", "b", "rest"]
    assert "Returns" in sections(text)
    assert "Raises" not in sections(text)


@pytest.mark.parametrize("name", MODULES)
def test_help_of_a_public_module_can_be_read(name: str) -> None:
    assert pydoc.render_doc(importlib.import_module(name))
