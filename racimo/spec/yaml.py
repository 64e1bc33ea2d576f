"""A run's spec as a YAML file: the same fields as flags and Python keywords; errors name line and field.

Scalars follow YAML 1.2 where 1.1 surprises people who train models: `3e-4` is a number, `on` and `no` are words.
Where a field is text (`args`, `name`, `memory`, ...) the text is taken as it is written: `args: [--lr, 1e-3]`.
"""

import re
import shlex
from typing import Any

import msgspec
import yaml

from racimo.spec.build import FieldError, build_spec
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec

MAX_SPEC_BYTES = 1_000_000

_TEXT_FIELDS = frozenset(
    {
        "name",
        "train",
        "tune",
        "devices",
        "memory",
        "priority",
        "files",
        "env",
        "hang_after",
        "stop_grace",
        "to",
        "every",
    }
)
KINDS = ("train", "tune", "command")
"""What a run is; a flag for one replaces another in the file."""
_TEXT_LISTS = frozenset({"command", "args", "secrets"})


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), [*_first.replace("\0", ""), ""])


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_spec(text: str, *, source: str = "spec", overrides: dict[str, Any] | None = None) -> RunSpec:
    """The spec that `text` describes, with `overrides` (from flags) put over its fields.

    Raises `RacimoError` `invalid-spec` such as `spec.yaml line 3: unknown field worker`.
    """
    fields, lines = parse_fields(text, source=source)
    merged = merge_fields(fields, overrides or {})
    try:
        return build_spec(merged)
    except FieldError as error:
        line = lines.get(error.field, lines.get(error.field.split(".")[0]))
        place = f"{source} line {line}: " if line is not None else f"{source}: "
        raise error.as_racimo_error(place) from None


def merge_fields(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides` over `fields`: mappings (`config`, `variables`, `checkpoint`) entry by entry, others as a whole."""
    merged = dict(fields)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    for one in KINDS:
        if one in overrides:
            for other in KINDS:
                if other not in overrides:
                    merged.pop(other, None)
    return merged


def parse_fields(text: str, *, source: str = "spec") -> tuple[dict[str, Any], dict[str, int]]:
    """The fields as written and the line (from 1) of each, unchecked. Raises `RacimoError` where it is not YAML."""
    if len(text) > MAX_SPEC_BYTES:
        raise RacimoError("invalid-spec", f"{source} has {len(text)} characters; a spec has at most {MAX_SPEC_BYTES}")
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise RacimoError("invalid-spec", f"{source} is not a mapping of fields such as `train: train.py`")
        reader = _Reader(loader, source)
        return reader.mapping(root, ""), reader.lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or error.context or "not YAML"
        raise RacimoError("invalid-spec", f"{source} line {line}: {problem}") from None
    except yaml.YAMLError as error:
        raise RacimoError("invalid-spec", f"{source}: {error}") from None
    finally:
        loader.dispose()


class _Reader:
    """Walks the node tree, so that text stays as written and each field keeps its line."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.loader = loader
        self.source = source
        self.lines: dict[str, int] = {}

    def mapping(self, node: yaml.MappingNode, prefix: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value)
            line = key_node.start_mark.line + 1
            if name in fields:
                first = self.lines[prefix + name]
                raise RacimoError("invalid-spec", f"{self.source} line {line}: {name} stands already in line {first}")
            self.lines[prefix + name] = line
            fields[name] = self.value(name, value_node, prefix)
        return fields

    def value(self, name: str, node: yaml.Node, prefix: str) -> Any:
        if name in ("checkpoint", "study") and not prefix and isinstance(node, yaml.MappingNode):
            return self.mapping(node, f"{name}.")
        if name in _TEXT_FIELDS and isinstance(node, yaml.ScalarNode):
            return node.value
        if name in _TEXT_LISTS and isinstance(node, yaml.SequenceNode):
            scalars = [item for item in node.value if isinstance(item, yaml.ScalarNode)]
            if len(scalars) == len(node.value):
                return [item.value for item in scalars]
        if name in ("command", "args") and isinstance(node, yaml.ScalarNode):
            return shlex.split(node.value)
        if name == "variables" and isinstance(node, yaml.MappingNode):
            pairs = [(k.value, v.value) for k, v in node.value if isinstance(v, yaml.ScalarNode)]
            if len(pairs) == len(node.value):
                return dict(pairs)
        return self.loader.construct_object(node, deep=True)


def format_spec(spec: RunSpec) -> str:
    """The spec as YAML, fields at their defaults left out; `parse_spec` reads it back."""
    fields = msgspec.to_builtins(spec)
    for inner in ("snapshot", "requirements"):
        fields.pop(inner, None)
    if "checkpoint" in fields:
        default = msgspec.to_builtins(type(spec.checkpoint)())
        fields["checkpoint"] = {k: v for k, v in fields["checkpoint"].items() if v != default[k]}
    # Escapes beyond ASCII: PyYAML writes U+0085 and its like so that they are read back as line breaks otherwise.
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=False, default_flow_style=None)
