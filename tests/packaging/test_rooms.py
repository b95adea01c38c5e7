"""Imports run one way between the package's folders, in no circle, and what begins with _ stays in its own."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "liger_jax"
# Each folder or module, with those that it may import; all may import those of `BELOW`.
KERNELS = {"pallas_kernels"}
OPS = {"ops", *KERNELS}
MODELS = {"models", "layers", "losses", *OPS}
ROOMS = {
    "pallas_kernels": set(), "ops": KERNELS, "layers": OPS, "losses": OPS, "models": MODELS,
    "integrations": MODELS, "training": MODELS, "planner": {"training", *MODELS},
    "chat": set(), "data": {"chat", "training", *MODELS}, "trainers": {"data", "planner", "training", *MODELS},
    "commands": {"trainers", "data", "chat", "planner", "training", *MODELS},
}  # fmt: skip
BELOW = ("_options", "user_errors", "_install", "_interrupt", "_packages", "_tree", "_simulated", "_collector")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package by their names after "liger_jax."; a package has its folder's name."""
    found = {}
    for path in (path for room in (*ROOMS, *BELOW) for path in (PACKAGE / room).rglob("*.py")):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = ast.parse(path.read_text(encoding="utf-8"))
    return found | {name: ast.parse((PACKAGE / f"{name}.py").read_text()) for name in BELOW}


@functools.cache
def names_in(module: str) -> tuple[dict[str, int], dict[str, int]]:
    """What a module imports of the package, wherever in it, and the private names that it reads of imported modules.

    Both are names after "liger_jax.", with their lines.
    """
    imported, called, read = {}, {}, []
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"liger_jax.{module}, line {node.lineno}: imports say liger_jax."
            named = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            named = {each.asname or each.name: each.name for each in node.names}
        else:
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and isinstance(node.value, ast.Name):
                read.append((node.value.id, node.attr, node.lineno))
            continue
        for here, name in named.items():
            if name.startswith("liger_jax."):
                imported[name.removeprefix("liger_jax.")] = node.lineno
                called[here] = name.removeprefix("liger_jax.")
    of_modules = {name: each for name, each in called.items() if each in trees()}
    private = {f"{of_modules[name]}.{attr}": line for name, attr, line in read if name in of_modules}
    return imported, {name: line for name, line in private.items() if not name.endswith("__")}


def needs(module: str) -> set[str]:
    """The modules that a module imports."""
    modules = {name if name in trees() else name.rpartition(".")[0] for name in names_in(module)[0]}
    return modules & trees().keys() - {module}


def wrong_way(module: str) -> list[str]:
    """A sentence for each import of a module that leads to a folder above or beside its own."""
    room = module.partition(".")[0]
    allowed = {room, *ROOMS.get(room, ()), *(BELOW if room in ROOMS else {"user_errors", "_install", "_collector"})}
    return [
        f"liger_jax.{module}, line {line}: {room} must not import {name.partition('.')[0]}, as it does by {name}."
        for name, line in names_in(module)[0].items()
        if name.partition(".")[0] not in allowed
    ]


def private(module: str) -> list[str]:
    """A sentence for each private name of another folder that a module imports or reads."""
    room, found = module.partition(".")[0], []
    imported, read = names_in(module)
    for name, line in (imported | read).items():
        other, *parts = name.split(".")
        if other in ROOMS and other != room and any(part.startswith("_") for part in parts):
            found.append(f"liger_jax.{module}, line {line}: {name} is private to liger_jax.{other}.")
    return found


def circle(modules: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, in their order; none if there is no circle."""
    done, path = set(), []

    def walk(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        found = next(filter(None, map(walk, sorted(modules[module]))), [])
        path.pop()
        done.add(module)
        return found

    return next(filter(None, map(walk, sorted(modules))), [])


@pytest.mark.parametrize("room", [*ROOMS, *BELOW])
def test_a_room_imports_those_below_it_and_nothing_private_of_another(room):
    modules = [module for module in trees() if module.partition(".")[0] == room]
    assert modules
    wrong = [sentence for module in modules for sentence in wrong_way(module) + private(module)]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    found = circle({module: needs(module) for module in trees()})
    assert not found, f"a circle of imports: {' → '.join(found)}"


def test_a_wrong_import_is_named(monkeypatch):
    module = "data.rows_of_a_test"
    source = "from liger_jax.trainers import run\nfrom liger_jax.chat.template import _text\nrun._train\n"
    monkeypatch.setitem(trees(), module, ast.parse(source))
    assert wrong_way(module) == [
        f"liger_jax.{module}, line 1: data must not import trainers, as it does by trainers.run."
    ]
    assert private(module) == [
        f"liger_jax.{module}, line 2: chat.template._text is private to liger_jax.chat.",
        f"liger_jax.{module}, line 3: trainers.run._train is private to liger_jax.trainers.",
    ]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_commands_are_few_and_shallow():
    modules = [name for name in trees() if name.partition(".")[0] == "commands"]
    depth = functools.cache(lambda name: 1 + max(map(depth, needs(name).intersection(modules)), default=0))
    assert len(modules) <= 25 and max(map(depth, modules)) <= 5


def test_the_modules_that_decide_about_tokens_are_those_that_the_cache_of_tokens_names():
    (named,) = (
        ast.literal_eval(node.value)
        for node in trees()["data.training_rows"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MADE_BY"
    )
    needed, left = set(), {"data.answers", "data.token_cache"}
    while left:
        module = left.pop()
        needed.add(module)
        left |= {other for other in needs(module) if other.startswith(("chat.", "data."))} - needed
    assert {name.replace("/", ".") for name in named} == needed
