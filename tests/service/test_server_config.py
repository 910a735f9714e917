"""Where the server's configuration comes from, which source wins, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import SpeculatorConfig
from engine.errors import ConfigError
from server.config import load_config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_PORT", raising=False)


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('model = "from-file"\nport = 1\nmax-num-seqs = 2\ngrace = 3\n')
    monkeypatch.setenv("SLIPSTREAM_PORT", "4")
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQS", "5")
    config = load_config({"port": "6"}, file)
    assert (config.model, config.port, config.max_num_seqs, config.grace) == ("from-file", 6, 5, 3.0)
    assert config.metrics_port == 9090


def test_a_yaml_file_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nspeculators:\n- ngram,k=4\n- {method: suffix, k: 2}\n")
    methods = [(speculator.method, speculator.k) for speculator in load_config({}, file).speculators]
    assert methods == [("ngram", 4), ("suffix", 2)]


def test_everything_reaches_the_engine_s_configuration() -> None:
    engine = load_config(
        {
            "model": "models/tiny.gguf",
            "served_model_name": "tiny",
            "tokenizer": "models/other",
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": "256",
            "block_size": "8",
            "kv_cache_memory": "2GiB",
            "planned_sequence_length": "128",
            "prefix_cache": False,
            "max_num_seqs": "4",
            "max_num_batched_tokens": "128",
            "max_waiting": "7",
            "max_steps_in_flight": "2",
            "num_threads": "1",
            "seed": "3",
            "load_format": "dummy",
        }
    ).engine
    assert (engine.model.name, engine.model.tokenizer, engine.model.dtype) == (
        "tiny",
        "models/other",
        "float32",
    )
    assert (engine.model.seed, engine.model.load_format) == (3, "dummy")
    assert (engine.cache.block_size, engine.cache.kv_cache_bytes) == (8, 2 * 2**30)
    assert (engine.cache.planned_sequence_length, engine.cache.enable_prefix_cache) == (128, False)
    scheduler = engine.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_waiting) == (4, 128, 7)
    assert (engine.device, engine.max_model_len, engine.max_steps_in_flight, engine.num_threads) == (
        "cpu",
        256,
        2,
        1,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", SpeculatorConfig(method="ngram")),
        ("ngram,k=4", SpeculatorConfig(method="ngram", k=4)),
        (
            "draft_model, model=models/small, k=2, max_context=64",
            SpeculatorConfig(method="draft_model", model="models/small", k=2, options={"max_context": "64"}),
        ),
    ],
)
def test_a_speculator_is_written_in_one_flag(text: str, expected: SpeculatorConfig) -> None:
    assert load_config({"model": "m", "speculators": [text]}).speculators == (expected,)


def test_the_environment_separates_speculators_by_semicolons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SPECULATORS", "ngram,k=4;suffix")
    assert [speculator.method for speculator in load_config({"model": "m"}).speculators] == [
        "ngram",
        "suffix",
    ]


@pytest.mark.parametrize(
    ("source", "rates"), [("flag", "1,0.5, 0"), ("environment", "1,0.5,0"), ("file", "[1.0, 0.5, 0]")]
)
def test_speculation_options_come_from_every_source(
    source: str, rates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, object] = {"model": "m", "speculators": ["ngram", "suffix,k=2"]}
    file = tmp_path / "config.toml"
    file.write_text("")
    if source == "flag":
        flags |= {"draft_policy": "suffix", "allow_synthetic": True, "synthetic_acceptance": rates}
    elif source == "environment":
        monkeypatch.setenv("SLIPSTREAM_DRAFT_POLICY", "suffix")
        monkeypatch.setenv("SLIPSTREAM_ALLOW_SYNTHETIC", "true")
        monkeypatch.setenv("SLIPSTREAM_SYNTHETIC_ACCEPTANCE", rates)
    else:
        file.write_text(f'draft-policy = "suffix"\nallow-synthetic = true\nsynthetic-acceptance = {rates}\n')
    engine = load_config(flags, file).engine
    assert (engine.draft_policy, engine.default_speculator) == ("suffix", "suffix")
    assert (engine.allow_synthetic, engine.synthetic_acceptance) == (True, (1.0, 0.5, 0.0))
    assert engine.verification == "coupled"


def test_numerics_can_be_chosen() -> None:
    assert load_config({"model": "m"}).engine.numerics == "auto"
    assert load_config({"model": "m", "numerics": "exact"}).engine.numerics == "exact"


def test_the_verification_rule_can_be_chosen() -> None:
    assert load_config({"model": "m", "verification": "ratio"}).engine.verification == "ratio"


@pytest.mark.parametrize(
    ("policy", "speculators", "default"),
    [
        (None, ["ngram", "suffix"], "auto"),
        (None, [], "none"),
        ("auto", ["ngram"], "auto"),
        ("first", ["ngram", "suffix"], "ngram"),
        ("suffix", ["ngram", "suffix"], "suffix"),
        ("none", ["ngram"], "none"),
        ("first", [], "none"),
    ],
)
def test_the_draft_method_of_requests_that_name_none(
    policy: str | None, speculators: list[str], default: str
) -> None:
    flags = {"model": "m", "speculators": speculators} | ({} if policy is None else {"draft_policy": policy})
    assert load_config(flags).engine.default_speculator == default


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "model: got none, expected --model, SLIPSTREAM_MODEL"),
        ({"model": "m", "port": "70000"}, "port: .*65535, got '70000'"),
        ({"model": "m", "port": "abc"}, "port: .*integer.*, got 'abc'"),
        ({"model": "m", "kv_cache_memory": "2 apples"}, "kv_cache_memory: .*, got '2 apples'"),
        ({"model": "m", "block_size": 0}, "cache.block_size: .*, got 0"),
        ({"model": "m", "max_steps_in_flight": 3}, "max_steps_in_flight: .*, got 3"),
        ({"model": "m", "dtype": "int4"}, "dtype: .*'float32'.*, got 'int4'"),
        ({"model": "m", "grace": -1}, "grace: .*, got -1"),
        ({"model": "m", "speculators": ["ngram,4"]}, "speculators: .*expected METHOD,key=value"),
        ({"model": "m", "speculators": ["gemma4_mtp=path"]}, "speculators: .*expected METHOD,key=value"),
        ({"model": "m", "speculators": [""]}, "speculators: .*expected METHOD,key=value"),
        ({"model": "m", "speculators": ["ngram,k=0"]}, r"speculators.0.k: .*, got '0'"),
        (
            {"model": "m", "speculators": ["ngram"], "draft_policy": "eagle"},
            "draft_policy: .*expected one of 'auto', 'first', 'none', 'ngram', got 'eagle'",
        ),
        (
            {"model": "m", "draft_policy": "ngram"},
            "draft_policy: .*'none' .no draft method is loaded., got 'ngram'",
        ),
        ({"model": "m", "verification": "typical"}, "verification: .*'coupled' or 'ratio', got 'typical'"),
        ({"model": "m", "synthetic_acceptance": "0.5"}, "synthetic_acceptance: .*expected allow_synthetic"),
        (
            {"model": "m", "allow_synthetic": True, "synthetic_acceptance": "0.5,high"},
            "synthetic_acceptance.1: .*number.*, got 'high'",
        ),
        (
            {"model": "m", "allow_synthetic": True, "synthetic_acceptance": "0.5,1.5"},
            "synthetic_acceptance: .*rates from 0 to 1",
        ),
        (
            {
                "model": "m",
                "speculators": ["ngram,k=3"],
                "allow_synthetic": True,
                "synthetic_acceptance": "1,1",
            },
            "synthetic_acceptance: .*expected a rate for each of 3 drafts",
        ),
        (
            {
                "model": "m",
                "allow_synthetic": True,
                "synthetic_acceptance": "0.5",
                "verification": "ratio",
            },
            "synthetic_acceptance: .*verification 'coupled'",
        ),
        ({"model": "m", "prot": 1}, "prot: there is no such setting"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_got(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(flags)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.ini", "", "expected a .toml, .yaml or .yml file"),
        ("config.toml", "model = ", "cannot read"),
        ("config.yaml", "a: [", "cannot read"),
        ("config.yaml", "- a", "got list in"),
        ("config.toml", "modle = 'm'", "modle: there is no such setting"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config({}, tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        load_config({}, tmp_path / "none.toml")


@pytest.mark.parametrize(
    "name", ["SLIPSTREAM_SPECULATOR", "SLIPSTREAM_MAX_NUM_SEQ", "slipstream_kv_cache_memry"]
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"got {name.upper()}, which is no setting; expected SLIPSTREAM_"):
        load_config({"model": "m"})


def test_variables_of_kubernetes_and_of_clients_are_not_taken_for_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "PORT_50051_TCP", "PORT_50051_TCP_PORT", "METRICS_SERVICE_PORT"]
    for name in [*names, "ADDRESS", "TOKEN", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY", "CACHE"]:
        monkeypatch.setenv(f"SLIPSTREAM_{name}", "x")
    load_config({"model": "m"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "a.pem"}, "tls_key: got none"),
        ({"tls_key": "a.key"}, "tls_cert: got none"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca: got one without tls_cert"),
        ({"max_time_to_first_token": "0"}, "max_time_to_first_token: "),
        ({"keepalive_time": "-1"}, "keepalive_time: "),
    ],
)
def test_settings_of_security_and_connections_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"model": "m", **options})
