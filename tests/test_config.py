"""The YAML file: numbers, overrides, and errors on one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import ctxext
from ctxext.config import load_config, load_method, parse_method
from ctxext.methods import METHODS

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(ctxext.ConfigError) as caught:
        load_config(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("text", ["4", "4.0", '"4"', '"4.0"', "4e0", "0.4e1"])
def test_every_way_of_writing_a_number_means_that_number(tmp_path: Path, text: str) -> None:
    assert load_method(write(tmp_path, f"method: {{name: yarn, factor: {text}}}")) == ctxext.YaRN(factor=4.0)


@pytest.mark.parametrize("text", ["1e6", "1.0e+6", "1000000", '"1e6"', "1_000_000"])
def test_a_base_in_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    method = load_method(write(tmp_path, f"method: {{name: rope_theta, rope_theta: {text}}}"))
    assert method == ctxext.RopeTheta(rope_theta=1_000_000.0)


@pytest.mark.parametrize("text", ["16384", '"16384"', "16384.0", "1.6384e4"])
def test_lengths_are_whole_numbers(tmp_path: Path, text: str) -> None:
    method = load_method(write(tmp_path, f"method: {{name: yarn, max_position_embeddings: {text}}}"))
    assert method.max_position_embeddings == 16384
    assert isinstance(method.max_position_embeddings, int)


@pytest.mark.parametrize("factor", ["0", "-1", "0.5", ".nan", ".inf", "true", "abc", "[4]", '""', "{a: 1}"])
def test_an_impossible_factor_is_refused_with_key_and_value(tmp_path: Path, factor: str) -> None:
    message = error_of(write(tmp_path, f"method: {{name: yarn, factor: {factor}}}"))
    assert "settings.yaml: method.factor: expected" in message
    assert f"got {yaml.safe_load(factor)!r}" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("method: {name: yarn, facter: 4}", ["method.facter", "4", "did you mean factor?"]),
        ("method: {name: yran, factor: 4}", ["method.name", "yran", "did you mean yarn?"]),
        ("method: {name: NTK-by-parts, factor: 4}", ["did you mean ntk_by_parts?"]),
        ("method: {name: 4}", ["method.name", "unknown method 4", "pi, ntk"]),
        ("method: {type: yarn, factor: 4}", ["method.name", "type is Transformers' key; here it is name"]),
        ("method: {rope_type: yarn, factor: 4}", ["rope_type is Transformers' key; here it is name"]),
        ("method: {name: yarn, type: yarn, factor: 4}", ["method.type", "here it is name"]),
        ("method: {name: yarn, factor: 4, beta_fast: 1, beta_slow: 32}", ["beta_fast 1", "beta_slow 32", "swapped"]),
        ("method: {name: ntk_by_parts, factor: 4, alpha: 32, beta: 1}", ["alpha 32", "beta 1"]),
        ("method: {name: llama3, factor: 4, low_freq_factor: 4, high_freq_factor: 1}", ["low_freq_factor 4"]),
        (
            "method: {name: yarn, factor: 4, original_max_position_embeddings: 64, max_position_embeddings: 128}",
            ["factor 4", "64", "256", "128"],
        ),
        (
            "method: {name: pi, original_max_position_embeddings: 64, max_position_embeddings: 32}",
            ["max_position_embeddings 32", "64"],
        ),
        ("method: {name: yarn, factor: 4, mscale: 1}", ["mscale and mscale_all_dim"]),
        ("method: {name: yarn, factor: 4, attention_factor: 1, mscale: 1, mscale_all_dim: 1}", ["attention_factor"]),
        ("method: {name: rope_theta}", ["method.rope_theta", "missing"]),
        ("method: {name: longrope, factor: 2}", ["method.long_factor", "missing"]),
        ("method: {name: yarn, factor: 4, truncate: 3}", ["method.truncate", "3"]),
        ("method: {name: yarn, factor: 4, ramp: turns}", ["method.ramp", "dimension", "turns"]),
        (
            "method: {name: dca, chunk_size: 8, local_size: 24}",
            ["method dca", "local_size 24", "chunk_size 8", "swapped"],
        ),
        ("method: {name: dca, chunk_size: many}", ["method.chunk_size", "many"]),
        ("method: {name: dca, factor: 0.5}", ["method.factor", "0.5"]),
        ("method: {name: dca, temperature: -1}", ["method.temperature", "-1"]),
        ("method: {name: dca, attention: flash}", ["method.attention", "'fused' or 'naive'", "flash"]),
        ("method: {name: dca, chunks: 8}", ["method.chunks", "8", "did you mean chunk_size?"]),
        ("method: {name: dca, frequencies: yarn}", ["method.frequencies", "yarn"]),
        ("method: {name: dca, frequencies: 4}", ["method.frequencies", "4"]),
        ("method: {name: dca, frequencies: {factor: 4}}", ["method.frequencies", "name"]),
        ("method: {name: dca, frequencies: {name: yran, factor: 2}}", ["method.frequencies", "did you mean yarn?"]),
        (
            "method: {name: dca, frequencies: {name: yarn, facter: 2}}",
            ["method.frequencies", "facter", "2", "did you mean factor?"],
        ),
        ("method: {name: dca, frequencies: {name: yarn, factor: 0.5}}", ["method.frequencies", "factor", "0.5"]),
        ("method: {name: dca, frequencies: {name: dynamic_ntk}}", ["frequencies", "dynamic_ntk", "static method"]),
        ("method: {name: dynamic_ntk, factor: 0.5}", ["method.factor", "0.5"]),
        ("method: {name: dynamic_ntk, step: 0}", ["method.step", "0"]),
        (
            "method: {name: dynamic_yarn, seq_len: 128, max_position_embeddings: 256}",
            ["method dynamic_yarn", "seq_len 128", "max_position_embeddings 256"],
        ),
        ("method: {name: dynamic_yarn, beta_fast: 1, beta_slow: 32}", ["beta_fast 1", "beta_slow 32", "swapped"]),
        ("method: yarn", ["method", "expected a mapping", "write method: {name: yarn}"]),
        ("name: yarn\nfactor: 4", ["put them under 'method:'"]),
        ("methods: {name: yarn}", ["methods", "unknown section", "did you mean method?"]),
        ("perplexity: {lenght: 4096}", ["perplexity.lenght", "did you mean length?"]),
        ("perplexity: {length: 1}", ["perplexity.length", "1"]),
        ("perplexity: {protocol: slide}", ["perplexity.protocol", "prefix", "sliding", "slide"]),
        ("passkey: {depth: 1.5}", ["passkey.depth", "1.5"]),
        ("passkey: {trials: 0}", ["passkey.trials", "0"]),
        ("passkey: {trials: true}", ["passkey.trials", "boolean"]),
        ("model: {name: x, dtype: float8}", ["model.dtype", "float8", "bfloat16"]),
        ("model: {dtype: float32}", ["model.name", "missing"]),
        ("- a\n- b", ["expected sections"]),
        ("just text", ["expected sections"]),
        ("method: {name: yarn, factor: 4", ["not valid YAML in line"]),
        ("method: {name: yarn, factor: 2, factor: 4}", ["factor", "stands twice"]),
        ("method: {name: yarn, 1: 2}", ["method.1", "unknown key"]),
        ("method: {name: yarn, factor: 1e308}", ["method.factor", "1e308"]),
        ("perplexity: []", ["perplexity", "expected a mapping"]),
        ("passkey: 0", ["passkey", "expected a mapping"]),
        ("perplexity: {length: 1:30}", ["perplexity.length", "1:30"]),
        ("method: " + "[" * 3000, ["nested too deeply"]),
        ("method: !!python/object/apply:os.system ['true']", ["not valid YAML"]),
        ("method: !!python/name:os.system", ["not valid YAML"]),
    ],
)
def test_a_mistake_is_named_on_one_line_with_the_way_out(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = error_of(write(tmp_path, text))
    assert "settings.yaml" in message
    for part in parts:
        assert part in message


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "method: {name: yarn, factor: 4}")
    assert "did you mean" in error_of(tmp_path / "setings.yaml")


def test_a_folder_and_a_binary_file_are_no_configuration(tmp_path: Path) -> None:
    assert "can't be read" in error_of(tmp_path)
    (tmp_path / "weights.yaml").write_bytes(b"\x80\x81\xff\x00")
    assert "not a text file" in error_of(tmp_path / "weights.yaml")
    (tmp_path / "zeros.yaml").write_bytes(b"\x00\x01\x02")
    assert "not valid YAML" in error_of(tmp_path / "zeros.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""))
    assert config.model is None
    assert config.method is None
    assert config == load_config()


def test_settings_override_the_file_and_options_override_both(tmp_path: Path) -> None:
    path = write(tmp_path, "method: {name: yarn, factor: 2}\nperplexity: {length: 4096, stride: 8}")
    config = load_config(
        path,
        settings=["method.factor=8", "perplexity.length=[128, 256]", "perplexity.stride=16", "passkey.trials=7"],
        options={"perplexity": {"stride": 32, "window": None}},
    )
    assert config.method == ctxext.YaRN(factor=8)
    assert config.perplexity.length == (128, 256)
    assert config.perplexity.stride == 32
    assert config.passkey.trials == 7


def test_a_setting_of_null_drops_a_section_or_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, "method: {name: yarn, factor: 2}\nperplexity: {length: 4096}")
    config = load_config(path, settings=["method=null", "perplexity.length=null"])
    assert config.method is None
    assert config.perplexity.length == ()


def test_sections_without_keys_are_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "model:\nmethod:\nperplexity:\npasskey:\n")) == load_config()


def test_an_error_names_where_the_value_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "method: {name: yarn, factor: 2}")
    assert error_of(path, options={"model": {"name": "x", "dtype": "bf17"}}).startswith("--dtype: model.dtype")
    assert error_of(path, settings=["method.factor=0"]).startswith("-s method.factor=0: method.factor")


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "method: {<<: {name: yarn, factor: 2}, factor: 4}")
    assert load_method(path) == ctxext.YaRN(factor=4)


def test_a_leading_zero_is_not_octal_and_long_numbers_keep_every_digit(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "perplexity: {length: 0100}\npasskey: {seed: '12345678901234567891'}"))
    assert config.perplexity.length == (100,)
    assert config.passkey.seed == 12345678901234567891


def test_a_method_may_be_given_by_settings_alone() -> None:
    assert load_config(settings=["method.name=pi", "method.factor=3"]).method == ctxext.PI(factor=3)


@pytest.mark.parametrize("setting", ["method.factor", "factor=8", "method.a.b=8", "=8", ".=8"])
def test_a_setting_of_another_form_is_refused(setting: str) -> None:
    with pytest.raises(ctxext.ConfigError, match=r"expected section\.key=value"):
        load_config(settings=[setting])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid_and_opens_with_its_command(path: Path) -> None:
    config = load_config(path)
    methods = [config.method] if config.method else [m for m in config.compare.methods.values() if m]
    assert methods
    assert all(method.name in METHODS for method in methods)
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ctxext ")
    assert f"--config configs/{path.name}" in first


def test_every_method_has_a_shipped_file() -> None:
    given = [load_config(path).method for path in CONFIGS]
    assert {method.name for method in given if method is not None} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_survives_being_written_and_read(name: str) -> None:
    import tiny

    method = tiny.METHODS[name]
    assert load_method(yaml.safe_load(yaml.safe_dump(method.model_dump(mode="json")))) == method


def test_a_mistake_in_a_method_inside_another_is_said_once(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, "method: {name: dca, frequencies: {name: yarn, facter: 2}}"))
    assert message.count("method.frequencies") == 1
    assert message.count("unknown key") == 1


def test_a_method_inside_another_is_written_in_full(tmp_path: Path) -> None:
    path = write(tmp_path, "method: {name: dca, frequencies: {name: yarn, factor: 2, truncate: false}}")
    assert load_method(path) == ctxext.DCA(frequencies=ctxext.YaRN(factor=2, truncate=False))
    resolved = load_config(path).resolved("method")["method"]
    assert load_method(resolved) == load_method(path)
    assert (resolved["frequencies"]["name"], resolved["frequencies"]["truncate"]) == ("yarn", False)


def test_methods_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ctxext.YaRN(factor=4).factor = 8  # type: ignore[misc]


def test_the_methods_of_a_comparison_are_written_in_full(tmp_path: Path) -> None:
    text = "compare: {methods: {plain: null, A: {name: yarn, factor: 2, beta_fast: 16}, B: {name: dca}}}"
    methods = load_config(write(tmp_path, text)).resolved("compare")["compare"]["methods"]
    assert methods["plain"] is None
    assert methods["A"]["beta_fast"] == 16
    assert parse_method(methods["B"], "method") == ctxext.DCA()
