"""Read from the source who imports whom, and say which arrows of the house point the wrong way."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: The rooms of the house from the bottom up; a room imports from those above it in this list, and from within itself.
#: Several in one line know nothing of each other.
ROOMS = (
    ("errors", "progress", "lazy"),
    ("storage", "tokenization"),
    ("models",),
    ("core",),
    ("memory",),
    ("adapters",),
    ("hosts",),
    ("inspect",),
    ("training",),
    ("testing",),
    ("recipes", "pipelines"),
    ("serving", "evaluation"),
    ("cli",),
    ("extend",),
    ("__main__",),
)
#: Beside the tower: which rooms they may know; whoever stands above `hosts` may know them.
BESIDE = {
    "encoders": ("errors", "progress", "lazy", "storage", "tokenization", "models", "memory"),
    "data": ("errors", "progress", "lazy", "storage", "tokenization", "models", "memory", "core", "encoders"),
    "retrieval": (
        *("errors", "progress", "lazy", "storage", "tokenization", "models", "core", "memory", "adapters"),
        *("encoders", "data"),
    ),
}
#: Rooms that count as part of another one.
WITHIN = {"kv_store": "hosts"}
#: Most lines of Python in each room ("." for the files at the top), and most files in all. A change that needs more
#: moves something out; a limit above its goal only goes down.
BUDGETS = {
    ".": 730,  # goal 600
    "memory": 680,  # goal 650
    "core": 2_480,  # goal 2,450
    "adapters": 6_550,  # goal 5,600
    "hosts": 8_050,  # goal 7,000
    "kv_store": 1_560,
    "encoders": 3_160,  # goal 2,700
    "retrieval": 3_900,  # goal 3,400
    "models": 750,  # goal 700
    "data": 1_530,  # goal 1,500
    "training": 2_330,  # goal 1,700
    "inspect": 2_330,  # goal 2,100
    "pipelines": 1_920,  # goal 2,000
    "serving": 2_130,  # goal 2,000
    "evaluation": 200,
    "storage": 890,
    "testing": 1_610,
    "cli": 1_090,  # goal 940
    "recipes": 390,  # goal 360
}
FILES = 205
#: Heavy dependencies and their homes (a sub-package, or one file of it).
HOMES = {
    "transformers": (
        "encoders",
        "hosts",
        "kv_store",
        "training",
        "pipelines",
        "models",
        "serving.engine",
        "serving.answers",
        "adapters.composed.augmenting_model",
        "testing.adapter_calls",
    ),
    "accelerate": ("training",),
    "datasets": ("data", "retrieval.corpus"),
    "peft": ("training",),
    "tensorboard": ("training",),
    "torchao": ("pipelines.build",),
    "bitsandbytes": ("pipelines.build",),
    "diffusers": ("hosts.diffusion", "pipelines.text_to_image"),
    "huggingface_hub": ("hosts.saving",),
    "open_clip": ("encoders.openclip",),
    "torchvision": ("encoders.torchvision",),
    "timm": ("encoders.timm", "models.convert"),
    "soundfile": ("encoders.audio",),
    "soxr": ("encoders.audio",),
    "av": ("encoders.video",),
    "PIL": ("encoders.images", "inspect.trace", "inspect.doctor"),
    "faiss": ("retrieval.stores",),
    "qdrant_client": ("retrieval.stores",),
    "psycopg": ("retrieval.stores",),
    "lancedb": ("retrieval.stores",),
    "pyarrow": ("retrieval",),
    "pypdf": ("cli.encode",),
    "ray": ("serving.replicas",),
    "sentence_transformers": ("encoders.text", "retrieval.hits"),
    "gguf": (),
    "matplotlib": ("inspect.plots",),
    # `mmattn serve` asks whether they are there.
    "fastapi": ("serving", "cli.pipelines"),
    "uvicorn": ("cli.pipelines",),
    "prometheus_client": ("serving.middleware", "cli.pipelines"),
    "vllm": ("serving.vllm",),
    "lm_eval": ("evaluation.harness", "evaluation.__main__"),
    "plotly": ("inspect",),
    "pandas": (),
    "sklearn": ("encoders.names",),
}
#: What adapters and hosts are called in files.
KINDS = {"gated", "chunked", "composed", "decoupled", "causal_lm", "unet", "diffusion_transformer"}
ATTENTION_CALLS = {"softmax", "Softmax", "_softmax", "scaled_dot_product_attention", "flex_attention"}
#: What recipes may import by a longer name than `mmattn` itself.
FRONT_ROOMS = {
    "mmattn",
    "mmattn.encoders",
    "mmattn.errors",
    "mmattn.evaluation",
    "mmattn.inspect",
    "mmattn.models",
    "mmattn.pipelines",
    "mmattn.recipes",
    "mmattn.retrieval",
}


@dataclass(frozen=True)
class Import:
    """One import: by which module, of what, on which line; if it runs at load, and if it is for annotations only."""

    module: str
    name: str
    line: int
    at_load: bool
    typing: bool


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package folder by its name within it ("hosts.language"; the front door is "")."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    """Every import in the package, those by `import_extra("x", ...)` and `importlib.import_module("x")` too."""
    known = modules(package)
    return [found for name, path in known.items() for found in _imports(package.name, name, path, set(known))]


def wrong_arrows(package: Path) -> list[str]:
    """Imports within the package that point upwards, sideways, through the front door, or to an unknown place."""
    wrong = []
    for found in imports(package):
        root, _, target = found.name.partition(".")
        if root != package.name or found.module == "":
            continue
        complaint = _complaint(found.module.split(".")[0], target.split(".")[0])
        if complaint:
            wrong.append(f"{found.module}:{found.line} imports {found.name}: {complaint}")
    return wrong


def over_budget(package: Path, budgets: Mapping[str, int], files: int) -> list[str]:
    """Rooms with more lines than their budget or without one, and a package of too many lines or files."""
    sizes = dict.fromkeys(budgets, 0)
    for name, path in (found := modules(package)).items():
        room = "." if path.parent == package else name.split(".")[0]
        sizes[room] = sizes.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    wrong = [
        f"{room} has {size} lines and a budget of {budgets.get(room, 0)}: move something out"
        for room, size in sizes.items()
        if size > budgets.get(room, 0)
    ]
    return wrong + [f"{len(found)} files are more than {files}: put together what is read together"] * (
        len(found) > files
    )


def circle(package: Path) -> list[str]:
    """Modules that depend on each other in a circle, every kind of import counted, between folders and inside them."""
    known = modules(package)
    reached: dict[str, set[str]] = {name: set() for name in known}
    for found in imports(package):
        root, _, target = found.name.partition(".")
        if root == package.name and target in known and target != found.module and target:
            reached[found.module].add(target)
    try:
        graphlib.TopologicalSorter(reached).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def branches_on_kinds(package: Path) -> list[str]:
    """Lines outside `adapters` (or, of hosts, outside `hosts`) that ask for a kind by name, as `module:line`."""
    kinds = {
        "adapters": re.compile(r"(Gated|Chunked|Composed|Decoupled)(Adapter|Layers|Memory|View)$"),
        "hosts": re.compile(r"Adapted(CausalLM|UNet)$"),
    }
    lines = []
    for name, path in modules(package).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            compared = (
                isinstance(node, ast.Compare)
                and any(
                    isinstance(side, ast.Attribute) and side.attr == "kind" for side in (node.left, *node.comparators)
                )
                and any(getattr(side, "value", None) in KINDS for side in (node.left, *node.comparators))
            )
            if not (asks or compared):
                continue
            words = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
            words += [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            for room, pattern in kinds.items():
                if not name.startswith(room) and (compared or any(pattern.match(word) for word in words)):
                    lines.append(f"{name}:{node.lineno}")
    return sorted(set(lines))


def heavy_imports(package: Path) -> list[str]:
    """Heavy dependencies imported as the module loads, or outside their home."""
    wrong = []
    for found in imports(package):
        root = found.name.split(".")[0]
        if root not in HOMES or found.typing:
            continue
        # The server is loaded by its command only, and FastAPI reads annotations in the names of the module; vLLM loads
        # its plug-in itself, and Ray its router. A Trainer and its callbacks are subclasses of those of transformers;
        # the model for lm_eval is one of lm_eval's.
        loaded = {"serving": {"fastapi", "vllm", "ray"}, "training": {"transformers"}, "evaluation": {"lm_eval"}}
        if found.at_load and root not in loaded.get(found.module.split(".")[0], ()):
            wrong.append(f"{found.module}:{found.line} imports {root} at its top; do it inside what needs it")
        if not any(found.module == home or found.module.startswith(f"{home}.") for home in HOMES[root]):
            wrong.append(f"{found.module}:{found.line} imports {root}, whose home is {HOMES[root] or 'nowhere'}")
    return wrong


def attention_lines(package: Path, calls: set[str]) -> list[str]:
    """The lines of code (not of text) that name one of `calls`, as `module:line`."""
    lines = set()
    for name, path in modules(package).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            attribute = isinstance(node, ast.Attribute) and node.attr in calls
            plain = isinstance(node, ast.Name) and node.id in calls
            imported = isinstance(node, (ast.Import, ast.ImportFrom)) and any(
                alias.name.split(".")[-1] in calls for alias in node.names
            )
            if attribute or plain or imported:
                lines.add(f"{name}:{node.lineno}")
    return sorted(lines)


def back_doors(recipes: Path) -> list[str]:
    """Imports in recipes that go behind the front door of mmattn."""
    wrong = []
    for path in sorted(recipes.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                if name.split(".")[0] == "mmattn" and name not in FRONT_ROOMS:
                    wrong.append(f"{path.relative_to(recipes)}:{node.lineno} imports {name}")
    return wrong


def _complaint(importer: str, imported: str) -> str | None:
    if (importer, imported) == ("lazy", "errors"):
        return None
    importer, imported = WITHIN.get(importer, importer), WITHIN.get(imported, imported)
    height = {name: number for number, names in enumerate(ROOMS) for name in names}
    for name in (importer, imported):
        if name and name not in height and name not in BESIDE:
            return f"{name} has no room in the house; give it one in tests/style/architecture.py"
    if imported == "":
        return None if importer in ("cli", "__main__") else "the front door is for users; import from the module itself"
    if importer == imported:
        return None
    if importer in BESIDE:
        return None if imported in BESIDE[importer] else f"{importer} must not know {imported}"
    if imported in BESIDE:
        return None if height[importer] > height["hosts"] else f"{importer} must not know {imported}"
    return None if height[imported] < height[importer] else f"{importer} stands below or beside {imported}"


def _imports(package: str, module: str, path: Path, known: set[str]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here = f"{package}.{module}".rstrip(".").split(".")
    folder = here if path.name == "__init__.py" else here[:-1]
    for node, at_load, typing in _walk(tree, True):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = node.module or ""
            if node.level:
                stem = ".".join([*folder[: len(folder) - node.level + 1], *stem.split(".")]).rstrip(".")
            inner = stem.partition(".")[2]
            # A version number is a fact of the package, not a room of the house.
            for alias in (alias for alias in node.names if alias.name != "__version__"):
                longer = f"{inner}.{alias.name}".lstrip(".")
                names.append(f"{stem}.{alias.name}" if stem.split(".")[0] == package and longer in known else stem)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_extra", "import_module", "__import__") and isinstance(node.args[0].value, str):
                names = [node.args[0].value]
        for name in dict.fromkeys(names):
            yield Import(module, name, getattr(node, "lineno", 0), at_load, typing)


def _walk(node: ast.AST, at_load: bool, typing: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        types = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        later = at_load and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not types
        yield child, later, types
        yield from _walk(child, later, types)
