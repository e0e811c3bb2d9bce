"""Whether a task steps its optimizers itself and uses its config."""

import ast

from deeplightning.static.names import Names
from deeplightning.static.symbol import Functions, Thing
from deeplightning.static.syntax import first_argument


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


def ignores_config(names: Names, thing: Thing) -> bool:
    """Return whether `__init__` of a class, or of its nearest ancestor that has one, does not read the config, which is
    its first argument."""
    line, _ = names.line(thing)
    bodies = [each.node.body for each in line if isinstance(each.node, ast.ClassDef)]
    methods = [each for body in bodies for each in body if isinstance(each, Functions) and each.name == "__init__"]
    arguments = [arg.arg for arg in methods[0].args.posonlyargs + methods[0].args.args] if methods else []
    if len(arguments) < 2 or methods[0].args.vararg or methods[0].args.kwarg:
        return False
    used = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(methods[0])}
    return used.isdisjoint({arguments[1], "locals", "vars", "save_hyperparameters"})


def _value_set(statement: ast.stmt, self: str | None) -> bool | None:
    """What a statement sets it to; None if it does not."""
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id=name), attr="automatic_optimization")],
            value=ast.Constant(value=bool(value)),
        ) if name == self:
            return value
    return None
