"""What a search may try: for each method its fields, each with a fixed value, choices, a range or a monotone curve.

Values come from an Optuna trial; which ones are worth trying is the sampler's part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ctxext.errors import ConfigError, nearest
from ctxext.methods import Method, method_class
from ctxext.methods.base import Number, WholeNumber

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

PLAIN = "plain"
"""The label under which the model without a method is tried: ``plain: null``."""


@dataclass(frozen=True)
class Fixed:
    """One value, which is not searched."""

    value: Any

    def suggest(self, trial: BaseTrial, name: str, frequencies: int) -> Any:
        """The value."""
        return self.value

    def parameters(self, name: str, value: Any, frequencies: int) -> dict[str, Any] | None:
        """What the trial has to hold for ``value`` to be suggested; None where it can't be."""
        return {} if _plain(value) == self.value else None


@dataclass(frozen=True)
class Choices:
    """One of several values, without an order."""

    values: tuple[Any, ...]

    def suggest(self, trial: BaseTrial, name: str, frequencies: int) -> Any:
        """One of the values; lists and mappings stand in the trial as JSON, because Optuna takes scalars only."""
        by_key = {_key(value): value for value in self.values}
        return by_key[trial.suggest_categorical(name, list(by_key))]

    def parameters(self, name: str, value: Any, frequencies: int) -> dict[str, Any] | None:
        """As for :class:`Fixed`."""
        return {name: _key(_plain(value))} if _plain(value) in self.values else None


class Range(BaseModel):
    """Every number from ``low`` to ``high``, or in steps from ``low`` on; ``log``: by ratios instead of differences."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: Number
    high: Number
    log: bool = False
    step: Annotated[Number, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}; write a single value to fix it")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs low above 0, got {self.low:g}; raise low, or leave log out")
        if self.log and self.step is not None:
            raise ValueError("log and step can't go together; leave one of them out")
        return self

    def suggest(self, trial: BaseTrial, name: str, frequencies: int) -> float:
        """A number of the range."""
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def parameters(self, name: str, value: Any, frequencies: int) -> dict[str, Any] | None:
        """As for :class:`Fixed`."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return None
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        return {name: value} if math.isclose(steps, round(steps), abs_tol=1e-9) else None


class WholeRange(Range):
    """A range of whole numbers; ``step`` is 1 unless given."""

    low: WholeNumber
    high: WholeNumber
    step: Annotated[WholeNumber, Field(gt=0)] | None = None

    def suggest(self, trial: BaseTrial, name: str, frequencies: int) -> int:
        """A whole number of the range."""
        return trial.suggest_int(name, self.low, self.high, step=self.step or 1, log=self.log)


class Monotone(BaseModel):
    """Divisors of the frequencies that never fall from one to the next, from 1 at the fastest up to at most ``high``.

    Their logarithm is piecewise linear in the frequency's index, over ``knots`` evenly spaced points after the first.
    Knot k is searched as the share u_k, from 0 to 1, of what is left to ``high``::

        ln lambda_k = ln lambda_(k-1) + u_k * (ln high - ln lambda_(k-1))

    So every choice of shares is monotone, NTK-aware scaling is met exactly, and YaRN's ramp as nearly as the knots
    allow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    knots: Annotated[WholeNumber, Field(ge=1, le=64)]
    high: Annotated[Number, Field(gt=1)]

    def suggest(self, trial: BaseTrial, name: str, frequencies: int) -> list[float]:
        """``frequencies`` divisors."""
        top, levels = math.log(self.high), [0.0]
        for k in range(self.knots):
            levels.append(levels[-1] + trial.suggest_float(f"{name}.{k + 1}", 0.0, 1.0) * (top - levels[-1]))
        return [math.exp(_interpolated(levels, i * self.knots / max(1, frequencies - 1))) for i in range(frequencies)]

    def parameters(self, name: str, value: Any, frequencies: int) -> dict[str, Any] | None:
        """The shares that come nearest to the divisors ``value``."""
        if not isinstance(value, (list, tuple)) or len(value) != frequencies:
            return None
        top, logs = math.log(self.high), [math.log(max(1.0, float(divisor))) for divisor in value]
        shares, level = {}, 0.0
        for k in range(self.knots):
            wanted = min(_interpolated(logs, (k + 1) * (frequencies - 1) / self.knots), top)
            left = top - level
            shares[f"{name}.{k + 1}"] = min(1.0, max(0.0, (wanted - level) / left)) if left > 1e-12 else 0.0
            level += shares[f"{name}.{k + 1}"] * left
        return shares


Dimension = Any
"""``Fixed``, ``Choices``, ``Range``, ``Monotone`` or, for a method inside a method, ``Space``."""


@dataclass(frozen=True)
class Space:
    """The fields of one method, by name, each with what may be tried."""

    name: str
    fields: Mapping[str, Dimension]

    @property
    def cls(self) -> type[Method]:
        """The method's class."""
        return method_class({"name": self.name})

    def suggest(self, trial: BaseTrial, name: str, frequencies: int) -> dict[str, Any]:
        """Settings as they would stand in a file."""
        found = {key: field.suggest(trial, f"{name}.{key}", frequencies) for key, field in self.fields.items()}
        return {"name": self.name, **found}

    def parameters(self, name: str, value: Any, frequencies: int) -> dict[str, Any] | None:
        """As for :class:`Fixed`; ``value`` is a method, or its settings."""
        settings = value if isinstance(value, Mapping) else _plain(value)
        if not isinstance(settings, Mapping) or settings.get("name") != self.name:
            return None
        found: dict[str, Any] = {}
        for key, field in self.fields.items():
            part = field.parameters(f"{name}.{key}", settings.get(key), frequencies)
            if part is None:
                return None
            found |= part
        return found

    @property
    def searched(self) -> bool:
        """Whether anything in it is not fixed."""
        return any(
            field.searched if isinstance(field, Space) else not isinstance(field, Fixed)
            for field in self.fields.values()
        )

    def monotone_field(self) -> str | None:
        """The field that holds divisors of the frequencies, if one is searched."""
        return next((key for key, field in self.fields.items() if isinstance(field, Monotone)), None)


def parse_spaces(methods: Mapping[str, Any], path: str = "search.methods") -> dict[str, Space | None]:
    """The spaces by label; None for the plain model.

    A label is the name of a method, or stands for the one that its key ``name`` gives.

    Raises:
        ConfigError: one line that names the key, the value, and what to write instead.
    """
    spaces: dict[str, Space | None] = {}
    for label, settings in methods.items():
        if label == PLAIN:
            if settings:
                raise ConfigError(
                    f"{path}.{PLAIN}: the plain model has no settings, got {settings!r}; write plain: null"
                )
            spaces[label] = None
            continue
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(
                f"{path}.{label}: expected fields with what may be tried, e.g. factor: {{low: 2, high: 4}}, "
                f"got {settings!r}"
            )
        spaces[label] = _parse_space({"name": label, **(settings or {})}, f"{path}.{label}")
    return spaces


def _parse_space(settings: Mapping[str, Any], path: str) -> Space:
    try:
        cls = method_class(settings)
    except ConfigError as error:
        raise ConfigError(str(error).replace("method.name", f"{path}.name", 1)) from None
    fields = {key: value for key, value in settings.items() if key != "name"}
    for key in fields:
        if key not in cls.model_fields:
            known = [name for name in cls.model_fields if name != "name"]
            guess = nearest(str(key), known)
            hint = f"did you mean {guess}? " if guess else ""
            raise ConfigError(
                f"{path}.{key}: method {settings['name']} has no such field; {hint}Known: {', '.join(known)}"
            )
    parsed = {key: _parse_field(cls, key, value, f"{path}.{key}") for key, value in fields.items()}
    return Space(settings["name"], parsed)


def _parse_field(cls: type[Method], key: str, value: Any, path: str) -> Dimension:
    annotation = cls.model_fields[key].annotation
    if isinstance(value, Mapping):
        if "name" in value:
            if not _takes_method(annotation):
                raise ConfigError(f"{path}: this field takes no method; give a value, a list of choices, or a range")
            return _parse_space(value, path)
        if "knots" in value:
            if tuple not in {get_origin(part) for part in _parts(annotation)}:
                raise ConfigError(f"{path}: knots are for a field with a number for each frequency; give low and high")
            return _parse_model(Monotone, value, path)
        if not {int, float} & _parts(annotation):
            raise ConfigError(f"{path}: this field is no number, so it has no range; give a list of choices")
        found = _parse_model(WholeRange if int in _parts(annotation) else Range, value, path)
        for end in (found.low, found.high):
            _check_value(cls, key, end, path)
        return found
    if isinstance(value, (list, tuple)):
        if not value:
            raise ConfigError(f"{path}: no choices; give at least one value")
        for choice in value:
            _check_value(cls, key, choice, path)
        return Choices(tuple(_plain(choice) for choice in value)) if len(value) > 1 else Fixed(_plain(value[0]))
    _check_value(cls, key, value, path)
    return Fixed(value)


def _check_value(cls: type[Method], key: str, value: Any, path: str) -> None:
    """Raise ConfigError for a value that the field takes by no means; what fields forbid each other shows in trials."""
    field = cls.model_fields[key]
    if _takes_method(field.annotation) and value is not None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected a method, e.g. {{name: ntk, factor: 2}}, got {value!r}")
        from ctxext.config import parse_inner_method  # which knows all sections, the one with this space among them

        parse_inner_method(value, path)
        return
    if field.annotation is None or value is None:
        return
    annotation: Any = Annotated[(field.annotation, Field(), *field.metadata)]
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        shown = message.replace("should be", "it should be", 1) if message.startswith("should") else message
        raise ConfigError(f"{path}: {value!r} is out of bounds: {shown}") from None


def _takes_method(annotation: Any) -> bool:
    return any(isinstance(part, type) and issubclass(part, Method) for part in _parts(annotation))


def _parse_model(cls: type[Any], value: Mapping[str, Any], path: str) -> Any:
    try:
        return cls.model_validate(dict(value))
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join(str(part) for part in details["loc"])
        message = details["msg"].removeprefix("Value error, ")
        known = list(cls.model_fields)
        if details["type"] == "extra_forbidden":
            guess = nearest(key, known)
            hint = f"; did you mean {guess}?" if guess else ";"
            raise ConfigError(f"{path}.{key}: unknown key{hint} Known: {', '.join(known)}") from None
        if details["type"] == "missing":
            raise ConfigError(f"{path}: {key} is missing; give all of {', '.join(_required(cls))}") from None
        raise ConfigError(f"{path}{'.' + key if key else ''}: {message}") from None


def _required(cls: type[BaseModel]) -> list[str]:
    return [name for name, field in cls.model_fields.items() if field.is_required()]


def _parts(annotation: Any) -> set[Any]:
    """The annotation and everything inside its unions and ``Annotated``; not inside of tuples."""
    found = {annotation} if _hashable(annotation) else set()
    if get_origin(annotation) is not tuple:
        for part in get_args(annotation):
            found |= _parts(part)
    return found


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Methods as mappings, tuples as lists: as values stand in a file."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _key(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, sort_keys=True)


def _interpolated(levels: Sequence[float], place: float) -> float:
    """``levels`` at a fractional index, linear between neighbours."""
    low = min(int(place), len(levels) - 1)
    high = min(low + 1, len(levels) - 1)
    return levels[low] + (place - low) * (levels[high] - levels[low])
