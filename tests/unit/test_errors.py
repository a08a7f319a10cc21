"""The tree in the docstring of `exporter.errors` is that of the classes."""

import pkgutil
import re
from importlib import import_module
from inspect import isclass

import exporter
from exporter import errors
from exporter.errors import CommandFailed, Exit, ExporterError


SEPARATE = ("exporter.__main__", "exporter.demo")
"""The program, which runs when it is imported, and the demo, which imports nothing of ours."""


def find_errors() -> set[type[Exception]]:
    """Every class of an error in the package."""
    errors = set()
    for module in pkgutil.walk_packages(exporter.__path__, "exporter."):
        if not module.name.startswith(SEPARATE):
            for kind in vars(import_module(module.name)).values():
                if isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module.name:
                    errors.add(kind)
    return errors


def describe(error: type[Exception]) -> tuple[str, str, str, str]:
    """The parent of an error, its name, its exit code and its module."""
    code = getattr(error, "exit_code", None)
    module = error.__module__.removeprefix("exporter.")
    is_shown = error not in (ExporterError, CommandFailed)
    return (
        error.__bases__[0].__name__,
        error.__name__,
        "" if code is None else str(int(code)),
        module if is_shown else "",
    )


def read_tree() -> set[tuple[str, str, str, str]]:
    """The lines of the docstring as in `describe`; the parent is known by the indentation."""
    rows = set()
    above = ["Exception"]
    lines = re.findall(r"^    ( *)(\w+) *(\d*) *([\w.]*)$", errors.__doc__ or "", re.MULTILINE)
    for indentation, name, code, module in lines:
        del above[len(indentation) // 4 + 1 :]
        rows.add((above[-1], name, code, module))
        above.append(name)
    return rows


def test_the_tree_has_every_error() -> None:
    """Every error is in the tree: below its base, with its exit code and its module."""
    errors = find_errors()

    assert len(errors) > 20
    assert read_tree() == {describe(error) for error in errors}


def test_every_error_has_one_root() -> None:
    """`except ExporterError` catches every error of the exporter, and nothing else."""
    assert {error for error in find_errors() if not issubclass(error, ExporterError)} == set()


def test_errors_and_results_have_different_exit_codes() -> None:
    """An exit code of an error is never that of a command that has done its work."""
    results = {Exit.OK, Exit.CANNOT_BE_EMPTIED, Exit.DEPENDS_ON_OTHERS}
    codes = {error.exit_code for error in find_errors() if hasattr(error, "exit_code")}

    assert not codes & (results | {Exit.FAILED, Exit.INTERRUPTED, Exit.TERMINATED})
