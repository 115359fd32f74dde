"""Strict and typed notebook parameters.

papermill passes `-p anchor false` on as the string "false" (true in Python), only warns about a misspelt name,
and lets the defaults win when no cell carries the tag. Here each of these stops the notebook before it trains.
"""

from __future__ import annotations

import ast
import difflib
import typing
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

MISSING = object()  # the default of a parameter whose default is no literal
PAPERMILL_NAMES = {"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}  # from papermill's --inject-paths
_PARTS_OF_A_TYPE = (ast.Expression, ast.Name, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.BinOp, ast.BitOr,
                    ast.Load)  # fmt: skip
INJECTED_HEADER = "# Parameters"  # the first line of the cell that papermill injects


class ParameterError(ValueError):
    """A parameter's name, type or place is wrong; the message is one sentence."""


def parameters(namespace: MutableMapping[str, Any]) -> dict[str, Any]:
    """Check and coerce a notebook's parameters: `config = study.parameters(globals())`.

    The declarations are a cell of nothing but `name: type = default` lines. Values that stand for the declared
    type ("false", "1e-3", 20.0 for an int) are coerced and written back; the result is printed and returned.
    Raises `ParameterError` for an unknown name, a value of another type, or values that papermill injected
    before the defaults.
    """
    declared: dict[str, tuple[Any, Any]] = {}
    injected: dict[str, Any] = {}
    for source in namespace.get("In", ()):
        if found := declarations(source, namespace):
            if injected and not declared:
                raise ParameterError(
                    "The cell of default parameters has no tag 'parameters', "
                    f"so its defaults overwrote the given values of {', '.join(injected)}."
                )
            declared |= found
            injected = {}  # running the declarations again brings the defaults back
        elif source.split("\n", 1)[0].strip() == INJECTED_HEADER:
            injected = _assigned(source)
    if "In" not in namespace:  # a plain script
        hints = namespace.get("__annotations__", {})
        declared = {name: (_resolve(hint, namespace), MISSING) for name, hint in hints.items()}
    if not declared:
        raise ParameterError("No cell that consists of 'name: type = default' lines has run yet.")

    check_names(injected, declared)
    config = {name: coerce(name, namespace[name], kind) for name, (kind, _) in declared.items()}
    for name in injected.keys() & config.keys():
        given = injected[name]
        if given is not MISSING and coerce(name, given, declared[name][0]) != config[name]:
            raise ParameterError(f"Parameter '{name}' was given as {given!r} but is {config[name]!r} now.")
    namespace.update(config)

    width = max(map(len, config))
    for name, value in config.items():
        default = declared[name][1]
        changed = default is not MISSING and default != value
        print(f"{name:<{width}} = {value!r}" + (f"   (default: {default!r})" if changed else ""))
    return config


def declarations(source: str, namespace: Mapping[str, Any] | None = None) -> dict[str, tuple[Any, Any]]:
    """name -> (type, default) of a parameters cell; empty for a cell that holds any other statement."""
    found = {}
    for node in _statements(source):
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            kind = _resolve(ast.unparse(node.annotation), namespace or {})
            found[node.target.id] = (kind, _literal(node.value))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            return {}
    return found


def declared_in(notebook: Path) -> dict[str, tuple[Any, Any]]:
    """name -> (type, default) of a notebook's cell tagged 'parameters'; `ParameterError` where that is no such cell."""
    import nbformat

    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except OSError:
        raise
    except Exception as error:  # nbformat raises whatever its look at other text runs into
        raise ParameterError(f"{notebook.name} is no notebook, which is a file like 01_toy_2d.ipynb.") from error
    tagged = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    try:
        found = declarations(tagged[0]) if tagged else {}
    except ParameterError as error:
        raise ParameterError(f"{notebook.name}: {error}") from error
    if not found:
        raise ParameterError(
            f"{notebook.name} has no cell tagged 'parameters' that holds only 'name: type = default' lines."
        )
    for name, (kind, default) in found.items():
        if default is not MISSING:
            coerce(name, default, kind, f"{notebook.name}: ")
    return found


def check_names(given: Iterable[str], declared: Iterable[str], where: str = "") -> None:
    """Raise `ParameterError` for the first given name that is not declared, with the closest that are."""
    for name in given:
        if name not in declared and name not in PAPERMILL_NAMES:
            close = difflib.get_close_matches(str(name), list(declared), n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(declared)}."
            raise ParameterError(f"{where}Unknown parameter '{name}': {hint}")


def coerce(name: str, value: Any, kind: Any, where: str = "") -> Any:
    """`value` as the declared type `kind`, by pydantic's rules; `ParameterError` where it does not stand for one.

    Stricter than pydantic in one point: True and False are no numbers. Numbers may stand for text, since papermill
    reads `-p seeds 0` as a number.
    """
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    spelled = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    wanted = spelled.replace("typing.", "")
    refusal = f"{where}Parameter '{name}' must be {wanted} but is {value!r}."
    if "bool" not in wanted and any(isinstance(item, bool) for item in _leaves(value)):
        raise ParameterError(refusal)
    try:
        config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
        return TypeAdapter(kind, config=config).validate_python(value)
    except (ValidationError, PydanticUserError) as error:
        raise ParameterError(refusal) from error


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:  # shell lines and magics
        return [ast.Pass()]


def _assigned(source: str) -> dict[str, Any]:
    pairs = [(node.targets[0], node.value) for node in _statements(source) if isinstance(node, ast.Assign)]
    return {target.id: _literal(value) for target, value in pairs if isinstance(target, ast.Name)}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return MISSING


def _resolve(hint: Any, namespace: Mapping[str, Any]) -> Any:
    """The type that an annotation names; nothing in it is called, so that reading a notebook runs no code of it."""
    if not isinstance(hint, str):
        return hint
    if not all(isinstance(node, _PARTS_OF_A_TYPE) for node in ast.walk(ast.parse(hint, mode="eval"))):
        raise ParameterError(f"A parameter's type must be a plain type such as int or list[str], not {hint!r}.")
    try:
        return eval(hint, {**vars(typing), **namespace})
    except NameError as error:
        raise ParameterError(f"A parameter has the type {hint!r}, but {error}.") from error


def planned(folder: Path, profile: str, only: str | None, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """notebook stem -> checked parameters, for the chosen notebooks; every notebook of the folder is checked."""
    import yaml

    stems = sorted(path.stem for path in folder.glob("[0-9][0-9]_*.ipynb"))
    chosen = _choose(stems, only)
    declared = {stem: declared_in(folder / f"{stem}.ipynb") for stem in stems}
    file = folder / "params" / f"{profile}.yaml"
    try:
        settings = dict(yaml.safe_load(file.read_text()) or {})
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ParameterError(f"{file.name} is no valid parameter file: {' '.join(str(error).split())}") from error
    common = settings.pop("all", None) or {}
    check_names(settings, stems, f"{file.name}: ")
    check_names(common, {name for names in declared.values() for name in names}, f"{file.name}, all: ")
    plan = {}
    for stem in stems:
        own = settings.get(stem) or {}
        check_names(own, declared[stem], f"{file.name}, {stem}: ")
        merged = {**{name: common[name] for name in common if name in declared[stem]}, **own}
        merged |= {name: given[name] for name in given if name in declared[stem]}
        kinds = {name: declared[stem][name][0] for name in merged}
        plan[stem] = {name: coerce(name, merged[name], kinds[name], f"{file.name}, {stem}: ") for name in merged}
    return {stem: plan[stem] for stem in chosen}


def _choose(stems: list[str], only: str | None) -> list[str]:
    wanted = [item.strip() for item in (only or "").split(",") if item.strip()]
    for item in wanted:
        if not any(item in (stem, stem.split("_")[0]) for stem in stems):
            raise ParameterError(f"There is no notebook '{item}'; there are {', '.join(stems)}.")
    return [stem for stem in stems if not wanted or stem in wanted or stem.split("_")[0] in wanted]
