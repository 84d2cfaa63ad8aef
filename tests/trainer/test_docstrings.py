"""Every public function and class documents its parameters and its result."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

MODULES = [
    "trainer_adapter",
    "trainer_adapter.advantages",
    "trainer_adapter.attention",
    "trainer_adapter.balance",
    "trainer_adapter.compat",
    "trainer_adapter.gpu.packer",
    "trainer_adapter.losses",
    "trainer_adapter.microbatch",
]


def sections(documented: Any) -> dict[str, str]:
    """A NumPy docstring's sections by their titles, the summary under ''."""
    parts = re.split(r"^(\w+)\n-+\n", inspect.getdoc(documented) or "", flags=re.M)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def public(module_name: str) -> Iterator[tuple[str, Any]]:
    """Every public callable, and the public methods of classes."""
    module = importlib.import_module(module_name)
    for name in module.__all__:
        found = getattr(module, name)
        if not (inspect.isfunction(found) or inspect.isclass(found)):
            continue
        yield name, found
        if inspect.isclass(found) and found.__module__.startswith("trainer_adapter"):
            for method, function in vars(found).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def missing(documented: Any) -> list[str]:
    parts = sections(documented)
    absent = [] if parts[""].strip() else ["a summary"]
    # A class of values lists them as attributes instead.
    told = parts.get("Parameters", "") + parts.get("Attributes", "")
    signature = inspect.signature(documented)
    for parameter in signature.parameters:
        if parameter != "self" and not re.search(rf"^(?=\S).*?\b{parameter}\b", told, re.M):
            absent.append(f"parameter {parameter}")
    returns = signature.return_annotation
    if not inspect.isclass(documented) and returns not in ("None", None):
        absent += [] if "Returns" in parts else ["Returns"]
    return absent


@pytest.mark.parametrize("module", MODULES)
def test_each_public_callable_documents_its_parameters_and_its_result(module: str) -> None:
    offences = {name: absent for name, found in public(module) if (absent := missing(found))}
    assert not offences


def test_a_docstring_without_its_parameters_would_be_found() -> None:
    def vague(tokens: int) -> int:
        """Do it.

        Parameters
        ----------
        token : int
        """
        return tokens

    assert missing(vague) == ["parameter tokens", "Returns"]
