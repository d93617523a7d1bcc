"""What a package uses of torch.xpu and torch._C, read from its source: functions, classes, methods, arguments.

Types are followed as far as the package needs it: through annotations, assignments, and what torch's functions are
annotated to return. Where a name could be a method of a stream, an event or a graph and its owner cannot be told, that
is an error: annotate it.
"""

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch

CLASSES = {f"torch.xpu.{cls.__name__}": cls for cls in (torch.xpu.Stream, torch.xpu.Event, torch.xpu.XPUGraph)}
MEMBERS = {name for cls in CLASSES.values() for name in vars(cls) if not name.startswith("_")}
STUBS = ast.parse((Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text())


@dataclass(frozen=True)
class Use:
    """One place where the source names something of torch; for a call, with its arguments."""

    owner: str
    name: str
    called: bool = False
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def __str__(self):
        arguments = [*["…"] * self.positional, *(f"{keyword}=…" for keyword in self.keywords)]
        return f"{self.owner}.{self.name}" + (f"({', '.join(arguments)})" if self.called else "")


def dotted(node):
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return None


def _aliases(tree):
    """Other names for torch.xpu or what is in it, which would hide uses."""
    nodes = list(ast.walk(tree))
    known = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    known |= {id(n.args[0]) for n in nodes if isinstance(n, ast.Call) and dotted(n.func) == "hasattr"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.xpu", "torch._C") and id(node) not in known:
            yield dotted(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch.xpu", "torch._C.")):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (alias.name for alias in node.names if alias.name in ("xpu", "_C"))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "torch" and alias.asname)


class Source:
    """The modules of one package, with the types of what they name."""

    def __init__(self, sources):
        self.trees = [ast.parse(text) for text in sources]
        self.own = {node.name for tree in self.trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self.attributes = {}
        self.uses = set()
        self.unclear = [name for tree in self.trees for name in _aliases(tree)]
        for collecting in (False, False, True):  # types of attributes first, twice since they build on one another
            self.collecting = collecting
            for tree in self.trees:
                self._block(tree.body, {}, None)

    def _block(self, body, names, cls):
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._block(node.body, dict(names), node.name)
            elif isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                inner = {a.arg: self._annotated(a.annotation) for a in arguments}
                self._attribute(cls and node.name, self._annotated(node.returns))
                self._block(node.body, {**names, **inner, **({"self": cls, "cls": cls} if cls else {})}, None)
            else:
                self._statement(node, names)

    def _statement(self, node, names):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for into, value in pairs:
                    self._bind(into, self._type(value, names), names)
        elif isinstance(node, ast.AnnAssign):
            self._bind(node.target, self._annotated(node.annotation), names)
        for field in ("body", "orelse", "finalbody"):
            self._block(getattr(node, field, []), names, None)
        for handler in getattr(node, "handlers", []):
            self._block(handler.body, names, None)
        if self.collecting:
            self._expressions(node, names)

    def _bind(self, target, kind, names):
        if isinstance(target, ast.Name) and kind:
            names[target.id] = kind
        elif isinstance(target, ast.Attribute):
            self._attribute(target.attr, kind)

    def _attribute(self, name, kind):
        if name and kind:
            assert self.attributes.setdefault(name, kind) == kind, f"{name} is {kind} and {self.attributes[name]}"

    def _annotated(self, annotation):
        text = "" if annotation is None else ast.unparse(annotation)
        kinds = [part.strip() for part in text.split("|") if part.strip() != "None"]
        return kinds[0] if len(kinds) == 1 and (kinds[0] in CLASSES or kinds[0] in self.own) else None

    def _type(self, node, names):
        """The class of a value: one of torch.xpu, one of the package, or None."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self.attributes.get(node.attr)
        if isinstance(node, ast.Call):
            target = dotted(node.func)
            if target in CLASSES or target in self.own:
                return target
            if target and target.startswith("torch.xpu."):
                function = getattr(torch.xpu, target.removeprefix("torch.xpu."), None)
                returned = f"torch.xpu.{inspect.signature(function).return_annotation}" if function else None
                return returned if returned in CLASSES else None
        return None

    def _expressions(self, statement, names):
        """Notes the uses in a statement's own expressions; its blocks are statements of their own."""
        calls = {}
        pending = [statement]
        while pending:
            node = pending.pop()
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.stmt | ast.ExceptHandler):
                    pending.append(child)
            if isinstance(node, ast.Call):
                calls[id(node.func)] = node
            if isinstance(node, ast.Attribute):
                self._use(node, calls.get(id(node)), names)

    def _use(self, node, call, names):
        base = dotted(node.value)
        kind = self._type(node.value, names)
        if base in ("torch.xpu", "torch._C", "torch.cuda", *CLASSES):
            owner = base
        elif kind in CLASSES:
            owner = kind
        elif node.attr in MEMBERS and kind not in self.own:
            self.unclear.append(ast.unparse(node))
            return
        else:
            return
        if call is None:
            self.uses.add(Use(owner, node.attr))
        else:
            assert not any(isinstance(a, ast.Starred) for a in call.args), ast.unparse(call)
            keywords = tuple(keyword.arg or "**" for keyword in call.keywords)
            self.uses.add(Use(owner, node.attr, True, len(call.args), keywords))


def check(use):
    """Raises AssertionError or TypeError unless the installed torch has what is used, with such arguments."""
    arguments, keywords = [None] * use.positional, dict.fromkeys(use.keywords)
    if use.owner == "torch._C":  # in C, and absent from builds without XPU: the stubs say how it is called
        stub = next((n for n in STUBS.body if isinstance(n, ast.FunctionDef) and n.name == use.name), None)
        assert stub is not None, f"{use} is not in torch's stubs"
        names = [argument.arg for argument in stub.args.args]
        assert not stub.args.defaults, f"{use} has defaults"
        assert sorted([*names[: use.positional], *use.keywords]) == sorted(names), f"{use}, and torch has {names}"
        return
    owner = CLASSES[use.owner] if use.owner in CLASSES else torch.get_device_module(use.owner.removeprefix("torch."))
    target = inspect.getattr_static(owner, use.name, None)
    assert target is not None, f"torch has no {use}"
    if use.called:
        bound = [*([None] if use.owner in CLASSES or inspect.isclass(target) else []), *arguments]
        function = target
        if inspect.isclass(target):
            function = target.__new__ if "__new__" in vars(target) else target.__init__
        inspect.signature(function).bind(*bound, **keywords)
