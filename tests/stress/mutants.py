"""Faults put into the code by a tool, one at a time: does any test notice?

    pip install --group mutation        # cosmic-ray, in any environment
    python -m tests.stress.mutants --count 300 --seed 0 --workers 2 --python .venv/bin/python --out runs/mutants.jsonl

Places in the code of some rooms are drawn at random, each with one of cosmic-ray's operators that changes it;
annotations, docstrings and the texts of errors are left out. Each fault is put into a copy of the tree, and the tests
that lie nearest to its module are run until one fails. Those that live are printed as diffs at the end, to be read one
by one. A run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "adapters", "hosts", "retrieval", "training")
_HOSTS = ("tests/adapters", "tests/hosts", "tests/foreign", "tests/inspect")
#: The tests of each room, as folders or patterns; those that name the changed module come before all others.
TESTS = {
    "core": ("tests/test_*.py", "tests/hosts/causal_lm/test_settings.py", "tests/seq2seq"),
    "adapters": ("tests/test_golden.py", "tests/hosts/test_language_*.py", "tests/test_contract.py", *_HOSTS),
    "hosts": ("tests/test_golden.py", "tests/hosts/test_*_calls.py", "tests/test_contract.py", *_HOSTS),
    "retrieval": ("tests/retrieval", "tests/foreign"),
    "training": ("tests/training",),
}
SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, and the module with it."""

    module: str
    line: int
    operator: str
    occurrence: int
    diff: str


def draw(count: int, seed: int) -> list[Mutant]:
    """Faults at places drawn at random, no place twice; the same for the same seed and code."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    # Left out: those with arguments of their own (which variable), and `is` for `==`, which small numbers cannot tell.
    operators = {
        name: get_operator(name)
        for name in operator_names()
        if not get_operator(name).arguments() and not re.search(r"_(Eq|NotEq|Lt|LtE|Gt|GtE)_(Is|IsNot)$", name)
    }
    places: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / "mmattn" / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            skipped, tree = passed_over(source), get_ast(source)
            for name, kind in operators.items():
                operator, number = kind(), 0
                for node in ast_nodes(tree):
                    for begin, _ in operator.mutation_positions(node):
                        if not any(first <= begin[0] <= last for first, last in skipped):
                            module = str(path.relative_to(ROOT))
                            places.setdefault((module, begin), []).append((name, number))
                        number += 1
    random_numbers = random.Random(seed)
    mutants = []
    for module, begin in random_numbers.sample(sorted(places), len(places)):
        if len(mutants) == count:
            break
        name, number = random_numbers.choice(places[module, begin])
        source = (ROOT / module).read_text(encoding="utf-8")
        changed = mutate_code(source, operators[name](), number)
        if changed is None or not compiles(changed) or changed == source:
            continue
        lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), module, module, "", "", 2, "")
        mutants.append(Mutant(module, begin[0], name, number, "\n".join(lines)))
    return mutants


def passed_over(source: str) -> list[tuple[int, int]]:
    """The lines of annotations of fields, docstrings, raised errors, imports and overloads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        header = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        bare = isinstance(node, ast.AnnAssign) and node.value is None
        if doc or bare or isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom)):
            found.append((node.lineno, node.end_lineno or node.lineno))
        elif header:
            first = min((one.lineno for one in node.decorator_list), default=node.lineno)
            found.append((first, node.body[0].lineno - 1))
    return found


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def tests_for(module: str, files_at_most: int | None = None) -> list[str]:
    """The files of tests to run for a module, those that name it first."""
    room, name = module.split("/")[1], Path(module).stem
    found = (
        path
        for entry in TESTS[room]
        for path in sorted((ROOT / entry).rglob("test_*.py") if (ROOT / entry).is_dir() else ROOT.glob(entry))
    )
    files = list(dict.fromkeys(found))
    dotted = module.removesuffix(".py").replace("/", ".")

    def distance(path: Path) -> int:
        text = path.read_text(encoding="utf-8")
        return 0 if dotted in text else 1 if name.strip("_") in path.stem else 2

    return [str(path.relative_to(ROOT)) for path in sorted(files, key=distance)[:files_at_most]]


def copies(workers: int, folder: Path) -> Iterator[Path]:
    """Copies of the tree, one for each worker."""
    for number in range(workers):
        copy = folder / str(number)
        kept = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in kept.stdout.split("\n"):
            if name and (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        yield copy


class Runner:
    """A process that runs pytest again and again in one copy of the tree.

    Args:
        copy: the tree.
        python: what runs the tests.
    """

    def __init__(self, copy: Path, python: str) -> None:
        self.copy = copy
        environment = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": "/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = [python, str(copy / "tests" / "stress" / "forked_tests.py")]
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, mutant: Mutant, files_at_most: int | None = None) -> tuple[str, str]:
        """What the tests say of the tree with this fault: "killed", "lived" or "timed out"; the test that noticed."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        path = self.copy / mutant.module
        source = path.read_text(encoding="utf-8")
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not slow and not gpu"]
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
        arguments += tests_for(mutant.module, files_at_most)
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            path.write_text(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence), encoding="utf-8")
            asked = {"cwd": str(self.copy), "arguments": arguments, "seconds": SECONDS}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        finally:
            path.write_text(source, encoding="utf-8")
        if answer["code"] is None:
            return "timed out", ""
        if answer["code"] == 4 and "ImportError while loading conftest" in answer["out"]:
            return "killed", "the package cannot be imported"
        if answer["code"] not in (0, 1):
            raise RuntimeError(f"pytest ended with code {answer['code']}: {answer['out'][-2000:]}")
        test = next((line for line in answer["out"].splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        return ("lived" if answer["code"] == 0 else "killed"), test


def main() -> None:
    words = argparse.ArgumentParser(description="Do the tests notice faults that a tool puts into the code?")
    words.add_argument("--count", type=int, default=300)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--workers", type=int, default=1)
    words.add_argument("--files", type=int, help="run so many files of tests for a fault, the nearest; all by default")
    words.add_argument("--python", default=sys.executable, help="what runs the tests")
    words.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    given = words.parse_args()
    mutants = draw(given.count, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if given.out.exists():
        for line in given.out.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            known[one["module"], one["operator"], one["occurrence"]] = one["outcome"]
    left = [one for one in mutants if (one.module, one.operator, one.occurrence) not in known]
    print(f"{len(mutants)} faults, {len(left)} to try", flush=True)
    free: Queue[Runner] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        for copy in copies(given.workers, Path(folder)):
            free.put(Runner(copy, str(Path(given.python).absolute())))

        def attempt(mutant: Mutant) -> tuple[Mutant, str, str]:
            runner = free.get()
            try:
                return mutant, *runner(mutant, given.files)
            finally:
                free.put(runner)

        for number, (mutant, outcome, test) in enumerate(pool.map(attempt, left), 1):
            known[mutant.module, mutant.operator, mutant.occurrence] = outcome
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(mutant), "outcome": outcome, "test": test}) + "\n")
            print(
                f"{number}/{len(left)} {outcome:9} {mutant.module}:{mutant.line} {mutant.operator} {test}", flush=True
            )
        while not free.empty():
            free.get().process.kill()
    outcomes = [known[one.module, one.operator, one.occurrence] for one in mutants]
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome == "lived":
            print(f"\n{mutant.diff}")
    print({word: outcomes.count(word) for word in ("killed", "lived", "timed out")})


if __name__ == "__main__":
    main()
