"""Parameters of a function, for formats that write them one by one instead of as one JSON object.

A schema says in many ways what may stand in an object. Here it is taken apart into *shapes*: each
lists names with the schemas of their values, what else may be there, and how many. What no list of
shapes can say is refused by name. Shapes may be narrower than the schema, never wider: an object
that fits one of them fits it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from headrace.structured_outputs import inline_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.dialects.tools import Tool

_MAX_SHAPES = 64
_MAX_DEPTH = 32
_MAX_WORK = 20_000
_MAX_STATES = 5000
_MAX_PATTERNS = 16
_UNSAID = (
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
    "unevaluatedProperties", "enum", "const", "$dynamicRef", "$recursiveRef",
)
"""What can be said of an object and not by shapes."""
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "$comment", "$id", "$schema",
})
_ROOT = "parameters"
_lock = threading.Lock()


class NoShapeError(ValueError):
    """A schema cannot be taken apart, or calls cannot be held to it; the message says at what.

    Args:
        fault: What it asks for.
        remedy: What else its author can do.
    """

    def __init__(self, fault: str, remedy: str = "leave it out") -> None:
        super().__init__(fault)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Parameters whose names a schema does not list.

    Attributes:
        pattern: Found in their names, or None for any name.
        others: Patterns that are not found in them.
        schema: Of their values.
    """

    pattern: str | None
    others: tuple[str, ...]
    schema: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way in which parameters may be put together.

    Attributes:
        properties: Name to schema of the value, in the order in which they are written.
        required: Those that must be there.
        extras: What may come after them.
        least: How many there are at least.
        most: And at most, or None.
    """

    properties: dict[str, Any]
    required: frozenset[str]
    extras: tuple[Extra, ...] = ()
    least: int = 0
    most: int | None = None

    def without(self, is_left_out: Callable[[str], bool]) -> Shape:
        """The same without some of its names."""
        kept = {k: schema for k, schema in self.properties.items() if not is_left_out(k)}
        return replace(self, properties=kept, required=self.required.intersection(kept))

    def schemas_of(self, name: str) -> list[Any]:
        """Schemas of a name's value: its own, or those of all extras, one of which it fits."""
        if name in self.properties:
            return [self.properties[name]]
        return [extra.schema for extra in self.extras]


def shapes_of(tool: Tool) -> list[Shape]:
    """Take a function's parameters apart.

    Raises:
        NoShapeError: Its schema asks for what shapes cannot say, or nothing fits it.
    """
    root = {"type": "object", **tool.parameters}
    shapes = [shape for part in _Taker(root).parts(root) for shape in _shape(part)]
    if not shapes:
        raise NoShapeError("a schema that no call fits")
    return shapes


def plain_shape(tool: Tool) -> Shape:
    """The parameters that are listed, where a call need not fit the rest of the schema."""
    properties = tool.parameters.get("properties") or {}
    kept = {name: schema for name, schema in properties.items() if schema is not False}
    required = frozenset(tool.parameters.get("required") or ())
    return Shape(properties=kept, required=required.intersection(kept))


def value_rule(schema: object, tool: Tool) -> str:
    """The rule of a value that is written as JSON; its references are those of the parameters."""
    known: Any = schema if isinstance(schema, dict) else schema is not False
    if _refers(known):
        root = {k: v for k, v in tool.parameters.items() if k not in ("$id", "id")}
        known = {**_moved(known), "$defs": {_ROOT: _moved(root)}}
    return inline_schema(known)


def resolved(schema: object, tool: Tool) -> object:
    """What a schema that is nothing but a reference refers to; others as they are."""
    for _ in range(_MAX_SHAPES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        if not schema.keys() <= _ANNOTATIONS | {"$ref"}:
            break
        try:
            schema = _target(schema["$ref"], tool.parameters)
        except NoShapeError:
            break
    return schema


# Rules of a grammar ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """How a parameter is written in one of its ways.

    Attributes:
        symbols: Of the grammar.
        mood: What the way after it depends on.
    """

    symbols: str
    mood: str


@dataclass(slots=True, kw_only=True)
class Writer:
    """How a format writes a list of parameters.

    Attributes:
        parameter: Ways of a place (an index among properties, or after them one of extras) in a
            mood.
        end: What ends the list in a mood; None if it cannot end there.
        mood: That of the beginning.
    """

    parameter: Callable[[int, str], Sequence[Written]]
    end: Callable[[str], str | None]
    mood: str


_State = tuple[int, int, int, bool, str]


def shape_rules(
    name: str, shapes: Sequence[Shape],
    writer_of: Callable[[str, Shape], tuple[list[str], Writer]],
) -> tuple[list[str], list[str]]:
    """Rules of all lists of parameters that one of the shapes allows.

    Args:
        name: What names of rules begin with.
        shapes: The shapes.
        writer_of: Rules of a shape's values, named after the given name, and how they are written.

    Returns:
        Names of the rules to begin with, and all rules.

    Raises:
        NoShapeError: There are no such lists, or too many rules.
    """
    starts, rules = [], []
    for place, shape in enumerate(shapes):
        start = f"{name}a{place}"
        values, writer = writer_of(start, shape)
        lists = _list_rules(start, shape, writer)
        if lists:
            starts.append(start)
            rules += lists + values
    if not starts:
        raise NoShapeError("a schema that no call fits")
    return starts, rules


def _list_rules(name: str, shape: Shape, writer: Writer) -> list[str]:
    """Rules of a shape's lists, none if it has no lists; `name` is that of the first.

    A rule is a place among the parameters, what was counted before it, and the writer's mood.
    """
    first: _State = (0, 0, 0, False, writer.mood)
    bodies: dict[_State, list[tuple[str, _State | None]]] = {}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        if state in bodies:
            continue
        if len(bodies) > _MAX_STATES:
            raise NoShapeError("too many ways to count parameters")
        bodies[state] = list(_ways(shape, writer, state))
        todo += [after for _, after in bodies[state] if after is not None]
    ends = _ending(bodies)
    if first not in ends:
        return []
    names = {state: name if state == first else f"{name}s{place}"
             for place, state in enumerate(ends)}
    return [
        f"{names[state]}: " + " | ".join(
            (symbols or '""') if after is None else f"{symbols} {names[after]}".strip()
            for symbols, after in bodies[state] if after is None or after in ends
        )
        for state in ends
    ]


def _ways(
    shape: Shape, writer: Writer, state: _State
) -> Iterable[tuple[str, _State | None]]:
    """What may be written at a state, and the state after it."""
    place, low, high, has_extra, mood = state
    keys = list(shape.properties)
    may_write = shape.most is None or high < shape.most
    counted = 0 if shape.most is None else high + 1
    if place < len(keys):
        if may_write:
            for written in writer.parameter(place, mood):
                after = (place + 1, min(low + 1, shape.least), counted, False, written.mood)
                yield written.symbols, after
        if keys[place] not in shape.required:
            yield "", (place + 1, low, high, False, mood)
        return
    for index in range(len(shape.extras) if may_write else 0):
        for written in writer.parameter(place + index, mood):
            # Two of them may have one name, and are one then.
            more = low if has_extra else min(low + 1, shape.least)
            yield written.symbols, (place, more, counted, True, written.mood)
    end = writer.end(mood)
    if low >= shape.least and end is not None:
        yield end, None


def _ending(bodies: dict[_State, list[tuple[str, _State | None]]]) -> dict[_State, None]:
    """States from which a list can be ended, in the order of `bodies`."""
    before: dict[_State, list[_State]] = {state: [] for state in bodies}
    ends: set[_State] = set()
    todo: list[_State] = []
    for state, ways in bodies.items():
        for _, after in ways:
            if after is None:
                todo.append(state)
            else:
                before[after].append(state)
    while todo:
        state = todo.pop()
        if state not in ends:
            ends.add(state)
            todo += before[state]
    return {state: None for state in bodies if state in ends}


def extra_names(extra: Extra, listed: Iterable[str], letters: str) -> str:
    """The names of extras, as an expression of a terminal.

    Args:
        extra: Which.
        listed: Names that are not among them.
        letters: Regular expression of all names that the format can write.
    """
    parts = [f"/{letters}/"]
    if extra.pattern is not None:
        parts.append(_containing(extra.pattern))
    parts += [f"~{_containing(other)}" for other in extra.others]
    parts += [f"~/{_escaped(name)}/" for name in listed]
    return " & ".join(parts)


def _containing(pattern: str) -> str:
    """A terminal of the texts in which a pattern is found.

    Raises:
        NoShapeError: It has anchors elsewhere than around all of it.
    """
    inner = pattern.removeprefix("^")
    last = re.search(r"(?<!\\)(?:\\\\)*(\$)\Z", inner)
    inner = inner if last is None else inner[:-1]
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    while (outer := re.sub(r"\([^()]*\)", "", bare)) != bare:
        if "^" in bare or "$" in bare:
            break
        bare = outer
    if "^" in bare or "$" in bare or ("|" in bare and inner != pattern):
        raise NoShapeError(f"the pattern {pattern!r:.100}, whose anchors are not around all of it")
    head = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "(?s:.*)" if last is None else ""
    return "/" + head + f"(?:{_slashed(inner)})" + tail + "/"


def _slashed(expression: str) -> str:
    """An expression that may stand between slashes."""
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], expression)


def _escaped(text: str) -> str:
    return "".join(
        letter if letter.isalnum() or letter in "_ " else f"\\x{{{ord(letter):x}}}"
        for letter in text
    )


# Taking a schema apart ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one part of a schema says of an object.

    `additional` are the schemas of values that neither `properties` nor `patterns` name; None if it
    does not speak of them.
    """

    properties: dict[str, list[Any]] = field(default_factory=dict)
    patterns: dict[str, list[Any]] = field(default_factory=dict)
    additional: list[Any] | None = None
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None

    def of(self, name: str) -> list[Any]:
        """Schemas of a name's value, all of which it must fit."""
        found = list(self.properties.get(name, ()))
        patterns = [
            schema for pattern, schemas in self.patterns.items() if _is_in(pattern, name)
            for schema in schemas
        ]
        if name not in self.properties and not patterns:
            return list(self.additional or ())
        return found + patterns

    def and_(self, other: _Part) -> _Part:
        """What both say."""
        if self.patterns and other.patterns:
            raise NoShapeError("patternProperties in several parts")
        names = dict.fromkeys((*self.properties, *other.properties))
        said = [part.additional for part in (self, other) if part.additional is not None]
        most = [part.most for part in (self, other) if part.most is not None]
        return _Part(
            properties={name: self.of(name) + other.of(name) for name in names},
            patterns={
                pattern: schemas + (second.additional or [])
                for one, second in ((self, other), (other, self))
                for pattern, schemas in one.patterns.items()
            },
            additional=[schema for schemas in said for schema in schemas] if said else None,
            required=(*self.required, *other.required),
            least=max(self.least, other.least),
            most=min(most) if most else None,
        )


class _Taker:
    """Takes a schema apart, within bounds: references can make much of little.

    Args:
        root: The whole schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = _MAX_WORK

    def parts(self, schema: object, depth: int = 0) -> list[_Part]:
        """Parts of which an object must fit one; none if nothing fits."""
        self._spend(1, depth)
        if isinstance(schema, bool):
            return [_Part()] if schema else []
        if not isinstance(schema, dict):
            raise NoShapeError("a schema that is no object")
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            return []
        unsaid = next((key for key in _UNSAID if key in schema), None)
        if unsaid is not None:
            raise NoShapeError(unsaid)
        found = [_own_part(schema)]
        for options in self._options(schema, depth + 1):
            if len(found) * len(options) > _MAX_SHAPES:
                raise NoShapeError(f"over {_MAX_SHAPES} combinations of anyOf")
            found = [self._both(one, other) for one in found for other in options]
        return found

    def _both(self, one: _Part, other: _Part) -> _Part:
        self._spend(len(one.properties) + len(other.properties))
        return one.and_(other)

    def _options(self, schema: dict[str, Any], depth: int) -> Iterable[list[_Part]]:
        """For each reference and combination, the parts of which one must be fitted."""
        if "$ref" in schema:
            yield self.parts(_target(schema["$ref"], self._root), depth)
        for one in _list(schema, "allOf"):
            yield self.parts(one, depth)
        one_of = _list(schema, "oneOf")
        if len(one_of) > 1:
            raise NoShapeError("oneOf", "write it as anyOf")
        for options in (one_of, _list(schema, "anyOf")):
            if options:
                yield [part for one in options for part in self.parts(one, depth)]

    def _spend(self, work: int, depth: int = 0) -> None:
        self._left -= work
        if self._left < 0 or depth > _MAX_DEPTH:
            raise NoShapeError(
                f"references or combinations without an end, or more than {_MAX_DEPTH} deep"
            )


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    if value is not None and (not isinstance(value, list) or not value):
        raise NoShapeError(f"{key} that is no list of schemas")
    return value or []


def _own_part(schema: dict[str, Any]) -> _Part:
    """What a schema says itself."""
    properties = _object(schema, "properties")
    patterns = _object(schema, "patternProperties")
    additional = schema.get("additionalProperties")
    required = schema.get("required") or ()
    if len(patterns) > _MAX_PATTERNS:
        raise NoShapeError(f"over {_MAX_PATTERNS} patternProperties")
    for value in (*properties.values(), *patterns.values(), additional):
        if not isinstance(value, dict | bool) and value is not None:
            raise NoShapeError(f"{value!r:.100} in the place of a schema")
    if not isinstance(required, list | tuple) or not all(isinstance(n, str) for n in required):
        raise NoShapeError("required that is no list of names")
    counts = {key: schema.get(key) for key in ("minProperties", "maxProperties")}
    for key, count in counts.items():
        if count is not None and (type(count) is not int or count < 0):
            raise NoShapeError(f"{key} {count!r:.100}")
    part = _Part(
        properties={name: [value] for name, value in properties.items()},
        patterns={pattern: [value] for pattern, value in patterns.items()},
        additional=None if additional is None else [additional],
        required=tuple(required),
        least=counts["minProperties"] or 0,
        most=counts["maxProperties"],
    )
    # Names that are listed and fit a pattern must fit both schemas.
    return _Part(
        properties={name: part.of(name) for name in properties}, patterns=part.patterns,
        additional=part.additional, required=part.required, least=part.least, most=part.most,
    )


def _object(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    if value is not None and not isinstance(value, dict):
        raise NoShapeError(f"{key} that is no object")
    return value or {}


def _shape(part: _Part) -> list[Shape]:
    """The shape of a part; none if nothing fits."""
    names = dict.fromkeys((*part.properties, *part.required))
    joined = {}
    for name in names:
        is_known = name in part.properties or part.of(name) or part.additional is not None
        joined[name] = _joined(part.of(name)) if is_known else False
    lacking = next((name for name in part.required if joined[name] is False), None)
    if lacking is not None:
        if lacking not in part.properties:
            raise NoShapeError(
                f"required {lacking!r:.100}, which properties do not list", "list it there"
            )
        return []
    extras = [
        Extra(
            pattern=pattern, schema=_joined(schemas),
            others=tuple(other for other in part.patterns if other != pattern),
        )
        for pattern, schemas in part.patterns.items()
    ]
    if part.additional is not None:
        extras.append(
            Extra(pattern=None, schema=_joined(part.additional), others=tuple(part.patterns))
        )
    return [Shape(
        properties={name: schema for name, schema in joined.items() if schema is not False},
        required=frozenset(part.required),
        extras=tuple(extra for extra in extras if extra.schema is not False),
        least=part.least, most=part.most,
    )]


def _joined(schemas: Sequence[Any]) -> Any:  # noqa: ANN401 - a schema
    """One schema that says what all of them say."""
    if any(schema is False for schema in schemas):
        return False
    described = [schema for schema in schemas if isinstance(schema, dict)]
    said: list[dict[str, Any]] = []
    for schema in described:
        one = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        if one and one not in said:
            said.append(one)
    left = [one for one in said if not any(_says_type_of(other, one) for other in said)]
    if len(left) > 1:
        return {"allOf": left}
    if left:
        return left[0]
    return described[0] if described else True


def _says_type_of(schema: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Whether a schema says all that a plain type says."""
    kind = plain.get("type")
    if plain.keys() != {"type"} or schema == plain or not isinstance(kind, str):
        return False
    if schema.get("type") == kind:
        return True
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return (
        kind == "string" and isinstance(values, list) and "type" not in schema
        and all(isinstance(value, str) for value in values)
    )


def _is_in(pattern: str, name: str) -> bool:
    """Whether a pattern is found in a name, in time that grows with the name's length only."""
    with _lock:
        matcher, end = _matcher(pattern)
        ids = [*name.encode(), end]
        return bool(matcher.validate_tokens(ids) == len(ids))


@lru_cache(maxsize=_MAX_PATTERNS)
def _matcher(pattern: str) -> tuple[Any, int]:
    """The library's matcher of names in which a pattern is found, and the token that ends them."""
    import llguidance  # noqa: PLC0415 - only where a schema has patterns

    letters = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: NAME\nNAME: {_containing(pattern)}")
    matcher = llguidance.LLMatcher(letters, grammar, log_level=0)
    if matcher.is_error():
        raise NoShapeError(f"the pattern {pattern!r:.100}, which is no regular expression here")
    return matcher, letters.eos_token


def _target(reference: object, root: dict[str, Any]) -> Any:  # noqa: ANN401 - a schema
    """What a reference within the parameters points at.

    Raises:
        NoShapeError: Nothing, or something elsewhere.
    """
    value: Any = root
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        raise NoShapeError(f"$ref {reference!r:.100}, which is no place within the parameters")
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            raise NoShapeError(f"$ref {reference!r:.100}, where there is nothing")
    return value


def _refers(schema: object) -> bool:
    return '"$ref"' in json.dumps(schema)


def _moved(schema: Any) -> Any:  # noqa: ANN401 - a schema
    """A schema whose references find their places when the parameters are a definition."""
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in _DATA and not isinstance(value, dict):
            moved[key] = value
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#/$defs/{_ROOT}{value[1:]}"
        else:
            moved[key] = _moved(value)
    return moved
