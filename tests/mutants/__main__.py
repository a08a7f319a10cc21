"""`make mutants` changes one thing in a module, and checks that a test fails.

A mutant that no test notices is printed as `file:line before -> after`. Then either a test is
missing, or the mutant means the same as the original, and belongs in `equivalent.toml` with a
reason.

We do not use mutmut, because it first runs the whole suite, nor cosmic-ray, because it writes
mutants into the working tree. Here every run is in a temporary copy, with the few test files that
specify the module.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest


_TESTS = {
    "engine/verdicts/cooldown": (
        "cooldown vectors view metrics/begun_cooldowns ./counters server/page/lanes"
    ),
    "engine/verdicts/rules": "cooldown vectors view",
    "engine/verdicts/expiries": "expiries view",
    "engine/verdicts/foreseen": "view metrics/exposition",
    "engine/evacuations/diagnosis": "diagnosis recorded nodes taints evictions",
    "engine/evacuations/ended_migrations": "ended_migrations",
    "engine/store/evacuation_ends": "evacuation_ends",
    "engine/store/load": "load diagnosis drain evidence",
    "engine/evacuations/advice": "advice ./field_variants ./recorded_words",
    "engine/evacuations/situation": (
        "situation diagnosis recorded nodes taints ./field_variants advice outlook"
    ),
    "engine/evacuations/causes": "causes advice ./field_variants ./recorded_words",
    "engine/evacuations/conditions": "outlook drain nodes budgets taints ./field_variants",
    "engine/evacuations/outlook": "outlook drain budgets nodes ./field_variants",
    "engine/facts/placement": "placement",
    "engine/store/requesters": "requesters diagnosis evictions kube/migration_log",
    "engine/store/nodes": "nodes taints",
    "engine/store/budgets": "budgets",
    "engine/evacuations/drain": "drain node_drains nodes budgets taints evictions",
    "engine/evacuations/drain_outcomes": "drain budgets outlook",
    "engine/store/node_drains": "node_drains nodes evictions drain",
    "engine/verdicts/view": "view",
    "history": "./history",
    "engine/facts/evidence": (
        "evidence store diagnosis view requesters drain recorded server/admission/handlers advice"
    ),
    "engine/facts/history": "history",
    "engine/facts/trust": "trust",
    "engine/store/store": (
        "reasons store evidence view requesters nodes taints drain tracker node_drains evictions"
    ),
    "engine/store/merging": (
        "departures migration_records evacuation_ends store evidence tracker drain diagnosis"
        " recorded"
    ),
    "engine/store/objects": "store nodes evidence budgets tracker diagnosis evictions",
    "engine/store/migrations": "migrations store evidence",
    "engine/store/launchers": "launchers drain store evidence",
    "engine/store/tracker": (
        "evacuation_ends tracker taints evidence reasons store node_drains requesters"
    ),
    "engine/store/vmi_record": "vmi_record store evidence ./history",
    "engine/facts/model": (
        "engine/facts/model ./settings cooldown diagnosis evidence drain view budgets taints"
        " evictions causes server/api/answers kube/objects/kubevirt kube/watch/feed"
    ),
    "engine/facts/policy": (
        "./settings cooldown diagnosis evidence kube/objects/kubevirt kube/watch/feed"
        " metrics/begun_cooldowns server/api/answers"
    ),
    "engine/store/reasons": "reasons advice store nodes",
    "health": "./health",
    "kube/lease": "kube/lease",
    "kube/objects/facts": "kube/objects/kubevirt",
    "metrics/begun_cooldowns": "metrics/begun_cooldowns",
    "server/http/protocol": "program/protocol program/listeners",
    "server/http/answers": "program/protocol program/listeners server/api/handlers",
    "server/api/answers": "server/api/answers server/api/handlers cli/status cli/drain",
    "server/api/handlers": "server/api/handlers server/api/long_polls",
    "server/api/judge": "server/api/handlers server/api/answers server/admission/handlers",
    "server/api/explanation": "server/api/answers server/api/handlers",
    "words/evacuations": "words/evacuations advice taints nodes words/tables",
    "words/health": "cli/status",
    "words/verdicts": "server/api/answers cli/explain",
}
"""The tests that specify each module. A name without a folder is in a room of unit/engine, and one
in `program` is beside unit.
"""


def _file_of(name: str) -> str:
    folder, _, file = name.rpartition("/")
    if folder == "program":
        return f"tests/program/test_{file}.py"
    if folder:
        return f"tests/unit/{folder}/test_{file}.py"
    (path,) = (ROOT / "tests/unit/engine").rglob(f"test_{file}.py")
    return str(path.relative_to(ROOT))


ROOT = Path(__file__).resolve().parents[2]


MODULES = {
    f"exporter/{module}.py": [_file_of(name) for name in names.split()]
    for module, names in _TESTS.items()
}
"""The test files of each module, first those that fail most often; none needs a real server."""

ENOUGH = 0.95
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
_PAIRS: tuple[tuple[Callable[[], Any], Callable[[], Any]], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
)
SWAPS = {old: new for pair in _PAIRS for old, new in (pair, pair[::-1])} | {ast.Div: ast.Mult}
CALLS = {"min": "max", "max": "min"}
FORK = get_context("fork")
OUTPUT = "mutants.log"
IMPORTED = ("hypothesis.stateful", "pytest_asyncio", "tests.conftest", "xdist.plugin")
"""Modules that are imported before forking, so that not every process has to import them."""


@dataclass(frozen=True)
class Mutant:
    """One changed node of the syntax tree: where it is, and the whole changed source."""

    file: str
    number: int
    line: str
    function: str
    mutation: str
    source: str


def find_mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its source."""
    lines = source.splitlines(keepends=True)
    starts = [sum(len(line.encode()) for line in lines[:number]) for number in range(len(lines))]
    raw = source.encode()
    mutants = []
    for node, function in _nodes(ast.parse(source), ""):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for changed in _changes(node):
            after = ast.unparse(changed)
            text = after if isinstance(node, ast.stmt) else f"({after})"
            mutants.append(
                Mutant(
                    file=file,
                    number=node.lineno,
                    line=lines[node.lineno - 1].strip(),
                    function=function,
                    mutation=f"{ast.unparse(node)} -> {after}",
                    source=(raw[:begin] + text.encode() + raw[end:]).decode(),
                )
            )
    return mutants


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The nodes that can be changed, with their functions.

    Annotations, decorators, base classes, keywords of classes and f-strings are not changed. Nor is
    the number added to a revision, because readers only check whether a revision has changed.
    """
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases", "keywords"} and (
            name != "keywords" or isinstance(node, ast.ClassDef)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            inside = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = f"{function}.{child.name}".strip(".")
            elif isinstance(child, ast.expr | ast.stmt):
                yield child, function
                if isinstance(child, ast.AugAssign) and "revision" in ast.unparse(child.target):
                    continue
            yield from _nodes(child, inside)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    return _changed_statement(node) if isinstance(node, ast.stmt) else _changed_expression(node)


def _changed_expression(node: ast.expr) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                changed = [
                    SWAPS[type(op)]() if at == place else kept for at, kept in enumerate(ops)
                ]
                yield ast.Compare(left=node.left, ops=changed, comparators=node.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(op=SWAPS[type(op)](), values=node.values)
        case ast.BinOp(op=op) if type(op) in SWAPS:
            yield ast.BinOp(left=node.left, op=SWAPS[type(op)](), right=node.right)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name]), node.args, node.keywords)
        case _:
            pass


def _changed_statement(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Return(value=ast.Constant(value=None | False)):  # None and False are both falsy
            pass
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Constant()):  # a docstring
            pass
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield ast.Pass()
        case _:
            pass


def copy_tree(directory: Path) -> None:
    """Copy all files that git does not ignore, with uncommitted changes."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    named = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, named.stdout.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def run_tests(tree: Path, file: str, source: str) -> NoReturn:
    """Run the module's tests with this source, and exit with pytest's exit code."""
    path = tree / file
    path.write_text(source)
    # Python reuses bytecode if the source's size and time (in whole seconds) are the same, so it
    # may miss a change.
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
        cached.unlink()
    for name in [module for module in sys.modules if module.split(".")[0] in {"exporter", "tests"}]:
        del sys.modules[name]
    os.environ.pop("SOAK", None)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sink = os.open(tree / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    rewritten = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    # Runs that share a folder for temporary files may fail while one removes another's files.
    own = f"--basetemp={tree}.files"
    options = ["-q", "-x", "-m", "not soak", "-p", "no:cacheprovider", own, *rewritten]
    code = pytest.main([*options, "--hypothesis-profile=mutants", *MODULES[file]])
    os._exit(int(code))


def try_all(file: str, sources: list[str], trees: list[Path], seconds: float) -> list[int | None]:
    """The exit code of the tests for each source; None after a timeout."""
    codes: list[int | None] = [None] * len(sources)
    waiting = list(enumerate(sources))
    free = list(trees)
    running: dict[int, tuple[BaseProcess, Path, int, float]] = {}
    while waiting or running:
        while waiting and free:
            place, source = waiting.pop(0)
            tree = free.pop()
            process: BaseProcess = FORK.Process(target=run_tests, args=(tree, file, source))
            process.start()
            running[process.sentinel] = (process, tree, place, time.monotonic() + seconds)
        ready = set(wait(list(running), timeout=1))
        for sentinel, (process, tree, place, until) in list(running.items()):
            if sentinel not in ready and time.monotonic() < until:
                continue
            process.kill()
            process.join()
            codes[place] = process.exitcode if sentinel in ready else None
            shutil.copy2(ROOT / file, tree / file)
            free.append(tree)
            del running[sentinel]
    return codes


def drop_equivalent(mutants: list[Mutant], file: str) -> list[Mutant]:
    """Remove the mutants that are listed as equivalent; unknown entries are an error."""
    for entry in tomllib.loads(EQUIVALENT.read_text())["mutant"]:
        if entry["file"] != file:
            continue
        place = (entry["function"], entry["line"], entry["mutation"])
        others = [
            mutant for mutant in mutants if (mutant.function, mutant.line, mutant.mutation) != place
        ]
        if len(others) == len(mutants) or not entry["reason"]:
            sys.exit(f"{EQUIVALENT.name}: an entry matches no mutant, or has no reason: {entry}")
        mutants = others
    return mutants


def check(file: str, trees: list[Path], *, sample: int | None, seed: int) -> bool:
    """Run a module's mutants and print the survivors; returns whether enough were killed."""
    original = (ROOT / file).read_text()
    mutants = drop_equivalent(find_mutants(file, original), file)
    if sample is not None and sample < len(mutants):
        mutants = random.Random(seed).sample(mutants, sample)
    began = time.monotonic()
    if try_all(file, [original], trees[:1], 600) != [0]:
        print((trees[0] / OUTPUT).read_text())
        sys.exit(f"{file}: its tests fail even without a mutant")
    seconds = 30 + 10 * (time.monotonic() - began)
    codes = try_all(file, [mutant.source for mutant in mutants], trees, seconds)
    tried = sorted(zip(mutants, codes, strict=True), key=lambda pair: pair[0].number)
    killed = len(mutants) - codes.count(0)
    late = f"{codes.count(None)} of them by the timeout of {seconds:.0f} s"
    print(f"{file}: {killed} of {len(mutants)} killed, {late}")
    for mutant, code in tried:
        if not code:
            fate = "survived" if code == 0 else "timed out"
            print(f"    {fate}: {mutant.file}:{mutant.number} {mutant.mutation}")
            print(f"        in {mutant.function}: {mutant.line}")
    sys.stdout.flush()
    return killed >= ENOUGH * len(mutants)


def main() -> None:
    """Check every module of the table, or only the named ones."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help=f"default: all of {', '.join(MODULES)}")
    parser.add_argument("--all", action="store_true", help="every mutant, not a sample")
    parser.add_argument("--sample", type=int, default=45, help="how many mutants of each module")
    parser.add_argument("--seed", type=int, default=1, help="the random seed of the sample")
    asked = parser.parse_args()
    listed = {entry["file"] for entry in tomllib.loads(EQUIVALENT.read_text())["mutant"]}
    if strangers := {*asked.modules, *listed} - MODULES.keys():
        sys.exit(f"not in the table of modules: {', '.join(sorted(strangers))}")
    sample = None if asked.all else asked.sample
    for name in IMPORTED:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="exporter-mutants-") as directory:
        trees = [Path(directory, str(number)) for number in range(2)]
        for tree in trees:
            copy_tree(tree)
        enough = [
            check(file, trees, sample=sample, seed=asked.seed) for file in asked.modules or MODULES
        ]
    sys.exit(0 if all(enough) else 1)


if __name__ == "__main__":
    main()
