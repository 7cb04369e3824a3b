"""Which settings a module reads, by the types of its expressions: `settings.train.tensor` counts where `settings` is
known to be a `Settings`, and `config.train.tensor` of something else does not.

Known are parameters and fields annotated with a block, what is assigned from one, and `self.x` where any method of the
class assigns one to it.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from weftmoe import schema
from weftmoe.schema import Settings

BLOCKS: dict[str, type[BaseModel]] = {
    name: kind
    for name, kind in vars(schema).items()
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not BaseModel
}

Read = tuple[str, str]  # a block's class, and a key of it
Kinds = dict[str, str]  # name of a variable or of an attribute of self -> class of a block

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def reads(sources: Iterable[str]) -> set[Read]:
    """All that these modules read; what a property of a block reads is read where the property is."""
    found: set[Read] = set()
    for source in sources:
        found |= _Module(ast.parse(source)).found
    for block, key in list(found):
        if isinstance(getattr(BLOCKS[block], key, None), property):
            found |= _of_property(block, key)
    return found


def keys(block: type[BaseModel] = Settings) -> Iterator[Read]:
    """Every setting, blocks themselves left out."""
    for name, info in block.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind)
        else:
            yield block.__name__, name


def _of_property(block: str, name: str) -> set[Read]:
    with open(schema.__file__, encoding="utf-8") as file:
        module = ast.parse(file.read())
    (body,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == block)
    (function,) = (node for node in body.body if isinstance(node, ast.FunctionDef) and node.name == name)
    inner = _Module(ast.Module([], []))
    inner.visit_body(function, {"self": block}, {})
    # A property may read others.
    more = {read for read in inner.found if isinstance(getattr(BLOCKS[read[0]], read[1], None), property)}
    return inner.found.union(*(_of_property(*read) for read in more))


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self.found: set[Read] = set()
        self.visit_body(tree, {}, {})

    def visit_body(self, node: ast.AST, known: Kinds, of_self: Kinds) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self.visit_body(child, known, self._attributes(child, known))
            elif isinstance(child, _FUNCTIONS):
                self.visit_body(child, self._variables(child, known, of_self), of_self)
            else:
                self._note(child, known, of_self)
                self.visit_body(child, known, of_self)

    def _variables(self, function: Any, known: Kinds, of_self: Kinds) -> Kinds:
        """What is known inside of it. A variable that is a block somewhere in a function is one all over it."""
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        inner = {name: kind for name, kind in known.items() if name not in {arg.arg for arg in every}}
        inner |= {arg.arg: kind for arg in every if (kind := _annotated(arg.annotation)) is not None}
        for _ in range(2):  # an alias may be assigned before the walk meets what it is made of
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        inner |= self._assigned(target, node.value, inner, of_self)
        return inner

    def _assigned(self, target: ast.expr, value: ast.expr, known: Kinds, of_self: Kinds) -> Kinds:
        found: Kinds = {}
        for one, other in _pairs(target, value):
            kind = self._kind(other, known, of_self)
            if isinstance(one, ast.Name) and kind is not None:
                found[one.id] = kind
        return found

    def _attributes(self, body: ast.ClassDef, known: Kinds) -> Kinds:
        found: Kinds = {}
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind = _annotated(node.annotation)
                found |= {} if kind is None else {node.target.id: kind}
        for _ in range(2):  # an attribute may be made of another one
            for method in (node for node in body.body if isinstance(node, _FUNCTIONS)):
                inner = self._variables(method, known, found)
                for node in ast.walk(method):
                    if isinstance(node, ast.Assign):
                        for target in node.targets:
                            found |= self._self_assigned(target, node.value, inner, found)
        return found

    def _self_assigned(self, target: ast.expr, value: ast.expr, known: Kinds, of_self: Kinds) -> Kinds:
        found: Kinds = {}
        for one, other in _pairs(target, value):
            kind = self._kind(other, known, of_self)
            if _is_of_self(one) and kind is not None:
                found[one.attr] = kind
        return found

    def _kind(self, node: ast.expr, known: Kinds, of_self: Kinds) -> str | None:
        """Class of the block that an expression is."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if _is_of_self(node) and "self" not in known:
            return of_self.get(node.attr)
        owner = self._kind(node.value, known, of_self)
        if owner is None or node.attr not in BLOCKS[owner].model_fields:
            return None
        kind = BLOCKS[owner].model_fields[node.attr].annotation
        return kind.__name__ if isinstance(kind, type) and kind.__name__ in BLOCKS else None

    def _note(self, node: ast.AST, known: Kinds, of_self: Kinds) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = self._kind(node.value, known, of_self)
            if owner is not None:
                self.found.add((owner, node.attr))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment assigns to what, a tuple's parts one by one."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)
    else:
        yield target, value


def _is_of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _annotated(annotation: ast.expr | None) -> str | None:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value if annotation.value in BLOCKS else None
    return annotation.id if isinstance(annotation, ast.Name) and annotation.id in BLOCKS else None
