"""The YAML file: its sections, how a command's options override it, and errors that fit on one line."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from ctxext.errors import ConfigError, nearest
from ctxext.methods import Method, method_class
from ctxext.methods.base import Number, WholeNumber
from ctxext.search.space import parse_spaces


def _listed(value: Any) -> Any:
    """Let a single value stand for a list of one, and null for none."""
    if value is None:
        return []
    return [value] if isinstance(value, (int, float, str)) else value


Task = Literal["perplexity", "positions", "passkey", "ruler", "longppl"]


def _inner_method(value: Any) -> Any:
    """A method from a mapping, in a section that holds several."""
    return parse_inner_method(value, "compare.methods") if isinstance(value, Mapping) else value


Lengths = Annotated[tuple[Annotated[WholeNumber, Field(ge=2)], ...], BeforeValidator(_listed)]
Depths = Annotated[tuple[Annotated[Number, Field(ge=0, le=1)], ...], BeforeValidator(_listed)]


class Section(BaseModel):
    """A section of the file; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(Section):
    """Which checkpoint, and how to load it."""

    name: str = Field(description="Hub id, folder of a model or an adapter, .gguf file, or builtin:smollm2-135m.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    replace_scaling: bool = Field(False, description="Start from the unscaled base of a checkpoint that is scaled.")
    base: str | None = Field(None, description="The base model of an adapter, if it is not where the adapter says.")


class _TextSection(Section):
    """Documents, and how they are read."""

    dataset: str = Field(
        "builtin:python-docs", description="Hub id, file, folder, builtin:python-docs or builtin:python-stdlib."
    )
    config_name: str | None = None
    split: str | None = None
    text_column: str | None = None
    dataset_revision: str | None = None
    max_documents: Annotated[WholeNumber, Field(ge=1)] | None = None
    batch_size: Annotated[WholeNumber, Field(ge=1)] = 1
    bos: Literal["auto", "always", "never"] = "auto"


class PerplexitySection(_TextSection):
    """Perplexity of documents."""

    protocol: Literal["prefix", "sliding", "stream", "rolling", "same-target"] = "prefix"
    length: Lengths = ()
    window: Lengths = ()
    stride: Annotated[WholeNumber, Field(ge=1)] | None = None
    targets: Annotated[WholeNumber, Field(ge=1)] | None = None
    mode: Literal["pass", "decode"] = "pass"
    max_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    min_tokens: Annotated[WholeNumber, Field(ge=0)] | None = None


class PositionsSection(_TextSection):
    """Loss by position."""

    dataset: str = "builtin:python-stdlib"
    length: Annotated[WholeNumber, Field(ge=2)] | None = Field(None, description="Positions of each document.")


class PasskeySection(Section):
    """Retrieval of a number hidden in filler text."""

    length: Lengths = ()
    depth: Depths = (0.1, 0.5, 0.9)
    trials: Annotated[WholeNumber, Field(ge=1)] = 5
    seed: WholeNumber = 0
    answers: Literal["both", "generated", "forced"] = "both"
    distractors: Annotated[WholeNumber, Field(ge=0)] = 0
    filler: str | None = Field(None, description="A data set to hide keys in, instead of short sentences.")
    controls: Annotated[WholeNumber, Field(ge=0)] = 10
    batch_size: Annotated[WholeNumber, Field(ge=1)] = 1
    bos: Literal["auto", "always", "never"] = "auto"


class RulerSection(Section):
    """Retrieval, tracing and counting tasks."""

    length: Lengths = ()
    task: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field((), description="Default: all.")
    trials: Annotated[WholeNumber, Field(ge=1)] = 10
    seed: Annotated[WholeNumber, Field(ge=0)] = 0
    answers: Literal["both", "generated", "forced"] = "generated"
    batch_size: Annotated[WholeNumber, Field(ge=1)] = 1
    bos: Literal["auto", "always", "never"] = "auto"


class LongPPLSection(_TextSection):
    """Perplexity of the tokens that only long context predicts."""

    dataset: str = "builtin:python-stdlib"
    length: Annotated[WholeNumber, Field(ge=3)] | None = Field(None, description="Positions of each document.")
    keys: str | None = Field(None, description="Key set: a file, or the folder of a run that made one.")
    short: Annotated[WholeNumber, Field(ge=2)] | None = None
    stride: Annotated[WholeNumber, Field(ge=1)] | None = None
    alpha: Number | None = None
    beta: Number | None = None
    overlap: Literal["contained", "any"] = "contained"
    min_tokens: Annotated[WholeNumber, Field(ge=0)] | None = None


class CompareSection(Section):
    """Several methods on one checkpoint."""

    methods: dict[str, Annotated[Method | None, BeforeValidator(_inner_method)]] = Field(
        default_factory=dict, description="Label: method, or null for the plain model."
    )
    tasks: Annotated[tuple[Task, ...], BeforeValidator(_listed)] = (
        "perplexity",
        "passkey",
    )

    @field_serializer("methods")
    def _written(self, methods: dict[str, Method | None]) -> dict[str, Any]:
        """Each method with the settings of its own class."""
        return {label: m and m.model_dump(mode="json", exclude_none=True) for label, m in methods.items()}


class LoRASection(Section):
    """Low-rank adapters in place of all weights."""

    rank: Annotated[WholeNumber, Field(ge=1)] = 16
    alpha: Annotated[WholeNumber, Field(ge=1)] | None = Field(
        None, description="Scale times rank. Default: twice the rank."
    )
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    target_modules: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    trainable: Annotated[tuple[Literal["norm", "embed"], ...], BeforeValidator(_listed)] = Field(
        (), description="What is trained whole beside the adapters."
    )
    merge: bool = Field(False, description="Save the model with the adapters merged into it.")


class FinetuneSection(Section):
    """A short fine-tune; the defaults are YaRN's recipe."""

    dataset: str | None = None
    config_name: str | None = None
    split: str | None = Field(None, description="Default: train, or the first of test and validation that there is.")
    text_column: str | None = None
    dataset_revision: str | None = None
    sequence_length: Annotated[WholeNumber, Field(ge=2)] | None = Field(None, description="Tokens of a block.")
    pack: Literal["documents", "concat"] = "documents"
    positions: Literal["consecutive", "pose"] = "consecutive"
    sample_factor: bool = Field(
        False, description="Draw the factor of each step, and with pose its positions, up to the method's (clex)."
    )
    steps: Annotated[WholeNumber, Field(ge=1)] = 400
    batch_size: Annotated[WholeNumber, Field(ge=1)] = Field(1, description="Blocks at a time, in each process.")
    gradient_accumulation_steps: Annotated[WholeNumber, Field(ge=1)] = 64
    learning_rate: Annotated[Number, Field(gt=0)] = 2e-5
    warmup_steps: Annotated[WholeNumber, Field(ge=0)] = 20
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[Number, Number] = (0.9, 0.95)
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"
    gradient_checkpointing: bool = True
    lora: LoRASection | None = None
    seed: Annotated[WholeNumber, Field(ge=0)] = 0
    evaluate_every: Annotated[WholeNumber, Field(ge=1)] | None = Field(
        None, description="Steps from one evaluation, as section perplexity says, to the next."
    )
    save_every: Annotated[WholeNumber, Field(ge=1)] = 50
    keep: Annotated[WholeNumber, Field(ge=1)] = Field(2, description="Checkpoints that are kept.")
    trackers: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field((), description="E.g. tensorboard.")


def _checked_spaces(methods: dict[str, Any]) -> dict[str, Any]:
    """The mapping as it is, if spaces can be made of it."""
    parse_spaces(methods)
    return methods


class SearchText(Section):
    """Documents with keys in them, as trials or the held-out comparison read them."""

    dataset: str = "builtin:python-stdlib"
    config_name: str | None = None
    split: str | None = None
    text_column: str | None = None
    dataset_revision: str | None = None
    skip_documents: Annotated[WholeNumber, Field(ge=0)] = Field(
        0, description="Documents of the data set that are left to others, from its start."
    )
    max_documents: Annotated[WholeNumber, Field(ge=1)] = 4
    length: Lengths = Field((), description="Positions before which the loss is taken. Default: the target.")
    seed: WholeNumber = Field(0, description="Of the keys.")
    bos: Literal["auto", "always", "never"] = "auto"


class SearchWeights(Section):
    """What a nat of each part of the objective counts."""

    text: Annotated[Number, Field(ge=0)] = 1.0
    passkey: Annotated[Number, Field(ge=0)] = 0.1
    trained: Annotated[Number, Field(ge=0)] = 1.0

    @model_validator(mode="after")
    def _check(self) -> SearchWeights:
        if self.text == self.passkey == self.trained == 0:
            raise ValueError("all weights are 0, so that every setting would be as good; raise one")
        return self


class SearchSection(Section):
    """A search over methods and their settings."""

    target: Annotated[WholeNumber, Field(ge=2)] | None = Field(None, description="Tokens that settings have to reach.")
    methods: Annotated[dict[str, Any], AfterValidator(_checked_spaces)] = Field(
        default_factory=dict, description="Label: fields of the method, each a value, a list of choices, or a range."
    )
    trials: Annotated[WholeNumber, Field(ge=1)] = 50
    minutes: Annotated[Number, Field(gt=0)] | None = Field(None, description="No trial is begun after so many minutes.")
    seed: Annotated[WholeNumber, Field(ge=0)] = 0
    sampler: Literal["tpe", "gp", "random"] = "tpe"
    startup: Annotated[WholeNumber, Field(ge=1)] = Field(
        10, description="Trials before the sampler goes by what it has seen; and before any is stopped early."
    )
    pruning: Literal["median", "none"] = Field(
        "median", description="median: a trial worse than half of the others on the same documents is stopped."
    )
    last: Annotated[WholeNumber, Field(ge=1)] = Field(1024, description="Tokens before each length that are judged.")
    weights: SearchWeights = SearchWeights()
    depth: Annotated[Depths, Field(min_length=1)] = Field(
        (0.1, 0.5, 0.9), description="Where keys stand in each document: 0 start, 1 end."
    )
    text: SearchText = SearchText()
    held_out: SearchText = SearchText(skip_documents=4, max_documents=12, seed=1)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "perplexity": PerplexitySection,
    "positions": PositionsSection,
    "passkey": PasskeySection,
    "ruler": RulerSection,
    "longppl": LongPPLSection,
    "compare": CompareSection,
    "finetune": FinetuneSection,
    "search": SearchSection,
}


@dataclass(frozen=True)
class Config:
    """A validated file. A section that was not given is None, except those whose defaults are complete."""

    model: ModelSection | None
    method: Method | None
    perplexity: PerplexitySection
    positions: PositionsSection
    passkey: PasskeySection
    ruler: RulerSection
    longppl: LongPPLSection
    compare: CompareSection
    finetune: FinetuneSection
    search: SearchSection

    def resolved(self, *sections: str) -> dict[str, Any]:
        """Plain values with all defaults filled in, as they are written beside results."""
        values = {}
        for name in sections:
            section = getattr(self, name)
            values[name] = None if section is None else section.model_dump(mode="json", exclude_none=name == "method")
        return values

    def limited(self, most: int) -> Config:
        """The same evaluations on at most ``most`` documents, and prompts of each cell and control."""
        sections = {}
        for name in ("perplexity", "positions", "passkey", "ruler", "longppl"):
            section = getattr(self, name)
            counts = {
                key: getattr(section, key) for key in ("max_documents", "trials", "controls") if hasattr(section, key)
            }
            less = {key: most if count is None else min(most, count) for key, count in counts.items()}
            sections[name] = section.model_copy(update=less)
        return dataclasses.replace(self, **sections)


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    settings: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Read a file and lay overrides over it.

    Args:
        path: a YAML file, or None for defaults.
        settings: overrides ``section.key=value``, the value read as YAML.
        options: values by section and key that override both; None means not given.

    Raises:
        ConfigError: one line with file, key, value, and what was expected.
    """
    where = str(path) if path is not None else "configuration"
    data = _read_yaml(Path(path)) if path is not None else {}
    data = copy.deepcopy(data)
    sources: dict[tuple[str, str], str] = {}
    for setting in settings:
        sources.update(dict.fromkeys(_override(data, setting), f"-s {setting}"))
    for section, values in (options or {}).items():
        given = {key: value for key, value in values.items() if value is not None}
        sources.update({(section, key): f"--{key.replace('_', '-')}" for key in given})
        if given:
            data[section] = {**_mapping(data.get(section), section, where), **given}

    for section in data:
        if section not in SECTIONS and section != "method":
            raise ConfigError(f"{where}: {section}: unknown section{_suggest(section, ['method', *SECTIONS])}")
    parsed = {
        name: _parse(cls, _mapping(data.get(name), name, where), name, where, sources)
        for name, cls in SECTIONS.items()
        if data.get(name) is not None or name != "model"
    }
    method = data.get("method")
    return Config(
        model=parsed.get("model"),  # type: ignore[arg-type]  # each name maps to its own class in SECTIONS
        method=None if method is None else parse_method(_mapping(method, "method", where), where, sources),
        perplexity=parsed["perplexity"],  # type: ignore[arg-type]
        positions=parsed["positions"],  # type: ignore[arg-type]
        passkey=parsed["passkey"],  # type: ignore[arg-type]
        ruler=parsed["ruler"],  # type: ignore[arg-type]
        longppl=parsed["longppl"],  # type: ignore[arg-type]
        compare=parsed["compare"],  # type: ignore[arg-type]
        finetune=parsed["finetune"],  # type: ignore[arg-type]
        search=parsed["search"],  # type: ignore[arg-type]
    )


def load_method(source: Method | Mapping[str, Any] | str | os.PathLike[str]) -> Method:
    """A method from a method, a mapping ``{name: ..., ...}``, or a YAML file with a section ``method``.

    Raises:
        ConfigError: the settings are wrong, or the file has no section ``method``.
    """
    if isinstance(source, Method):
        return source
    if isinstance(source, Mapping):
        return parse_method(source, "method")
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"expected a method, a mapping or a path to a YAML file, got {source!r}")
    config = load_config(source)
    if config.method is None:
        raise ConfigError(f"{source}: no section method; write e.g. 'method: {{name: yarn, factor: 4}}'")
    return config.method


def parse_method(
    settings: Mapping[str, Any], where: str, sources: Mapping[tuple[str, str], str] | None = None
) -> Method:
    """Validate a mapping into the method that its ``name`` asks for."""
    sources = sources or {}
    try:
        cls = method_class(settings)
    except ConfigError as error:
        raise ConfigError(f"{sources.get(('method', 'name'), where)}: {error}") from None
    return _parse(cls, settings, "method", where, sources)


def parse_inner_method(settings: Mapping[str, Any], path: str) -> Method:
    """Validate a mapping that stands inside another method's settings, under the key ``path``."""
    try:
        cls = method_class(settings)
    except ConfigError as error:
        raise ConfigError(str(error).replace("method.name", f"{path}.name", 1)) from None
    try:
        return cls.model_validate({str(key): value for key, value in settings.items()})
    except ValidationError as error:
        raise ConfigError(_first_error(error, cls, path)) from None


_ModelT = TypeVar("_ModelT", bound=BaseModel)


def _parse(
    cls: type[_ModelT], settings: Mapping[str, Any], section: str, where: str, sources: Mapping[tuple[str, str], str]
) -> _ModelT:
    try:
        return cls.model_validate({str(key): value for key, value in settings.items()})
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        where = sources.get((section, str(location[0])), where) if location else where
        raise ConfigError(f"{where}: {_first_error(error, cls, section)}") from None


def _first_error(error: ValidationError, cls: type[BaseModel], section: str) -> str:
    details = error.errors()[0]
    path = ".".join([section, *(str(part) for part in details["loc"])])
    value = details["input"]
    key = str(details["loc"][0]) if details["loc"] else ""
    if details["type"] == "extra_forbidden":
        if key in ("type", "rope_type"):
            return f"{path}: unknown key; {key} is Transformers' key, here it is name (name: {value})"
        return f"{path}: unknown key (value {value!r}){_suggest(key, cls.model_fields)}"
    if details["type"] == "missing":
        return f"{path}: missing; {cls.model_fields[key].description or 'a value is required'}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    says_where = isinstance(details.get("ctx", {}).get("error"), ConfigError)
    if details["type"] == "value_error" and (says_where or not details["loc"]):
        return message
    if not details["msg"].startswith("Value error, expected"):
        message = (
            f"expected {message[0].lower()}{message[1:]}" if details["msg"].startswith("Input should") else message
        )
    return f"{path}: {message}, got {value!r}"


def _suggest(word: str, candidates: Any) -> str:
    guess = nearest(word, candidates)
    return (f"; did you mean {guess}?" if guess else ";") + f" Known: {', '.join(candidates)}"


def _mapping(value: Any, section: str, where: str) -> Mapping[str, Any]:
    if value is None:  # a section without keys
        return {}
    if not isinstance(value, Mapping):
        hint = f" (write {section}: {{name: {value}}})" if isinstance(value, str) else ""
        raise ConfigError(f"{where}: {section}: expected a mapping of keys to values, got {value!r}{hint}")
    return value


def _override(data: dict[str, Any], setting: str) -> list[tuple[str, str]]:
    """Lay ``section.key=value`` over the data, or drop a section with ``section=null``; returns what was set."""
    path, equals, text = setting.partition("=")
    section, dot, key = path.strip().partition(".")
    value = _load_yaml(text, f"-s {setting}") if equals else None
    if equals and section and not dot and value is None:
        data[section] = None
        return []
    if not equals or not section or not key or "." in key:
        raise ConfigError(f"-s {setting}: expected section.key=value, e.g. -s method.factor=8, or section=null")
    data[section] = {**_mapping(data.get(section), section, f"-s {setting}"), key: value}
    return [(section, key)]


class _StrictLoader(yaml.SafeLoader):
    """Builds plain values only, refuses a key that stands twice, and knows no octal or base-60 numbers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} stands twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping

    def construct_plain_int(self, node: yaml.ScalarNode) -> int | str:
        """A whole number in decimal; ``010`` and ``1:30`` stay text, to be judged where they are used."""
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text) if re.fullmatch(r"[+-]?(0|[1-9][0-9]*)", text) else text

    def construct_plain_float(self, node: yaml.ScalarNode) -> float | str:
        """A floating-point number; base 60 (``1:30.5``) stays text."""
        text = str(self.construct_scalar(node))
        return text if ":" in text else float(self.construct_yaml_float(node))


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_plain_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_plain_float)


def _load_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ConfigError(f"{where}: not usable YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML{line}: {problem}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [p.name for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        guess = nearest(path.name, siblings)
        raise ConfigError(f"{path}: no such file" + (f"; did you mean {guess}?" if guess else "")) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; expected YAML in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    data = _load_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections such as 'method:', got {type(data).__name__} {str(data)[:40]!r}")
    if "name" in data or "factor" in data:
        raise ConfigError(f"{path}: method settings stand at the top; put them under 'method:'")
    return {str(key): value for key, value in data.items()}
