"""Whether a task steps its optimizers itself, and whether it accumulates gradients itself."""

import ast

from deeplightning.static.names import Names
from deeplightning.static.syntax import first_argument
from deeplightning.static.thing import Functions, Thing


def steps_itself(names: Names, thing: Thing) -> bool:
    """Whether `__init__` of a class, or of the nearest ancestor that says anything of it, sets
    `self.automatic_optimization` to False, under no condition."""
    line, _ = names.line(thing)
    for each in line:
        body = each.node.body if isinstance(each.node, ast.ClassDef) else []
        for method in body:
            if isinstance(method, Functions) and method.name == "__init__":
                values = [_value_set(statement, first_argument(method)) for statement in method.body]
                if any(value is not None for value in values):
                    return [value for value in values if value is not None][-1] is False
    return False


def accumulates(names: Names, thing: Thing) -> bool:
    """Whether the nearest class that defines `training_step` has `accumulates = True` beside it: a step of one's own in
    a subclass may not heed what its ancestor's does."""
    line, _ = names.line(thing)
    for each in line:
        body = each.node.body if isinstance(each.node, ast.ClassDef) else []
        if any(isinstance(method, Functions) and method.name == "training_step" for method in body):
            return any(_says_so(statement) for statement in body)
    return False


def _says_so(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name(id="accumulates")], value=ast.Constant(value=True)):
            return True
    return False


def _value_set(statement: ast.stmt, self: str | None) -> bool | None:
    """What a statement sets it to; None if it does not."""
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id=name), attr="automatic_optimization")],
            value=ast.Constant(value=bool(value)),
        ) if name == self:
            return value
    return None
