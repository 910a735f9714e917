"""The server's configuration: flags, environment (SLIPSTREAM_*), a TOML or YAML file, defaults; first wins.

One model describes all of it: the flags of `slipstream serve` with their help are made from its fields
(server/cli/serve.py), and what concerns the engine is composed into an EngineConfig.
"""

from __future__ import annotations

import os
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ByteSize, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import (
    CacheConfig,
    CudaGraphsName,
    DTypeName,
    EngineConfig,
    NumericsName,
    SchedulerConfig,
    SpeculatorConfig,
    VerificationName,
    describe_validation_error,
    engine_config,
)
from engine.errors import ConfigError
from server.logs import LogFormat, LogLevel

ENV_PREFIX = "SLIPSTREAM_"
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
_CACHE = CacheConfig()
_SCHEDULER = SchedulerConfig()


def _option(default: Any, help_text: str, group: str, **bounds: Any) -> Any:
    """A field that is also a flag; `group` is its panel in the help."""
    return Field(default, description=help_text, json_schema_extra={"group": group}, **bounds)


def parse_speculator(text: object) -> object:
    """`METHOD,model=PATH,k=N,...` as fields of a SpeculatorConfig; other keys are the method's options."""
    if not isinstance(text, str):
        return text
    method, *pairs = (part.strip() for part in text.split(","))
    if not method or "=" in method or not all("=" in pair for pair in pairs):
        raise ValueError("expected METHOD,key=value,... such as ngram,k=4")
    fields: dict[str, Any] = {"method": method, "options": {}}
    for pair in pairs:
        key, _, value = pair.partition("=")
        (fields if key in ("model", "k") else fields["options"])[key] = value
    return fields


def _split_speculators(value: object) -> object:
    """The environment has one string: specifications separated by semicolons."""
    if isinstance(value, str):
        value = [part for part in value.split(";") if part]
    return [parse_speculator(item) for item in value] if isinstance(value, (list, tuple)) else value


def _split_rates(value: object) -> object:
    """Flag and environment have one string: `0.8,0.6`."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Speculators = Annotated[tuple[SpeculatorConfig, ...], NoDecode, BeforeValidator(_split_speculators)]
Rates = Annotated[tuple[float, ...] | None, NoDecode, BeforeValidator(_split_rates)]
GatewayProtocolName = Literal["none", "vllm"]
Port = Annotated[int, Field(ge=0, le=65535)]
_MAX_INT32 = 2**31 - 1  # gRPC's options are such: bytes, and milliseconds
_MAX_GRPC_SECONDS = _MAX_INT32 // 1000


class ServerConfig(BaseSettings):
    """A field is a flag (`--max-num-seqs`), a variable (`SLIPSTREAM_MAX_NUM_SEQS`) and a key of the file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str = _option("", "Directory, .gguf file or hub id of the model to serve. Required.", "Model")
    served_model_name: str = _option("", "Name that clients use. Empty: the last part of --model.", "Model")
    tokenizer: str | None = _option(
        None, "Directory or hub id of the tokenizer, if not with the model.", "Model"
    )
    revision: str | None = _option(None, "Revision on the hub.", "Model")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _option(
        "auto", "How to read the weights: auto, safetensors, gguf; dummy draws random ones.", "Model"
    )
    dtype: DTypeName = _option("auto", "auto, float32, bfloat16, float16 or float64.", "Model")
    max_model_len: int | None = _option(
        None, "Tokens of prompt and output, at most the model's limit. Default: that limit.", "Model"
    )
    seed: int = _option(0, "Seed of dummy weights.", "Model")

    device: str = _option("auto", "auto, cpu, cuda or cuda:N.", "Engine")
    num_threads: int | None = _option(None, "CPU threads of the engine. Default: torch's choice.", "Engine")
    block_size: int = _option(_CACHE.block_size, "Tokens of a KV cache block.", "Engine")
    kv_cache_memory: ByteSize | None = _option(
        None, "Size of the KV cache, such as 2GiB. Default: a share of what is free.", "Engine"
    )
    planned_sequence_length: int = _option(
        _CACHE.planned_sequence_length,
        "Tokens of a long request; shares the KV cache between layers with and without a window.",
        "Engine",
    )
    prefix_cache: bool = _option(_CACHE.enable_prefix_cache, "Keep computed prompts for reuse.", "Engine")
    max_num_seqs: int = _option(_SCHEDULER.max_num_seqs, "Requests that run at once.", "Engine")
    max_num_batched_tokens: int = _option(_SCHEDULER.max_num_batched_tokens, "Tokens of one step.", "Engine")
    max_waiting: int = _option(
        _SCHEDULER.max_waiting, "Requests in the queue; more are RESOURCE_EXHAUSTED.", "Engine"
    )
    max_time_to_first_token: float | None = _option(
        None,
        "Seconds; a request that would wait longer is RESOURCE_EXHAUSTED at once, like one whose deadline is sooner. "
        "Default: only its deadline counts.",
        "Engine",
        gt=0,
    )
    max_steps_in_flight: int | None = _option(
        None, "1 or 2. Default: 2 where the device runs by itself, else 1.", "Engine"
    )
    attention_backend: str = _option("auto", "auto, torch or triton.", "Engine")
    cuda_graphs: CudaGraphsName = _option(
        "auto",
        "none, full_decode (steps that only decode), full (with prompt chunks), or auto: full, if possible.",
        "Engine",
    )

    numerics: NumericsName = _option(
        "auto",
        "exact: tokens depend on their request alone; fast: near ties may vary; auto: exact where possible.",
        "Engine",
    )

    speculators: Speculators = _option(
        (),
        "Draft method to load, METHOD,model=PATH,k=N (such as ngram,k=4; k is 3 unless given); may be repeated.",
        "Speculation",
    )
    draft_policy: str = _option(
        "auto",
        "Draft method of requests that name none: a loaded one, the first, none, or auto (by measured speed).",
        "Speculation",
    )
    verification: VerificationName = _option(
        "coupled",
        "coupled: the tokens of plain decoding; ratio: only their distribution, more drafts accepted.",
        "Speculation",
    )
    allow_synthetic: bool = _option(False, "Allow --synthetic-acceptance.", "Speculation")
    synthetic_acceptance: Rates = _option(
        None,
        "For benchmarks, such as 0.8,0.6: accept draft i at rate i, whatever the model says.",
        "Speculation",
    )

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", "Service")
    port: Port = _option(50051, "Port of the gRPC service; 0 picks a free one.", "Service")
    metrics_port: Port = _option(9090, "Port of the Prometheus endpoint; 0 is off.", "Service")
    gateway_protocol: GatewayProtocolName = _option(
        "none",
        "vllm: serve vllm.grpc.engine.VllmEngine beside our own protocol, for gateways such as smg; none.",
        "Service",
    )
    gateway_host: str = _option("127.0.0.1", "Address of --gateway-port.", "Service")
    gateway_port: Port = _option(
        0,
        "Port for the gateway protocol alone, without TLS and tokens: whoever reaches it may generate. "
        "0: it is on --port, with what is asked for there.",
        "Service",
    )
    max_message_bytes: ByteSize = _option(
        ByteSize(16 * 2**20),
        "Largest request message, such as 16MiB; larger is RESOURCE_EXHAUSTED.",
        "Service",
        ge=1,
        le=_MAX_INT32,
    )
    max_prompt_tokens: int | None = _option(
        None, "Tokens of a prompt at most. Default: what fits the context.", "Service", ge=1
    )
    slow_reader_timeout: float = _option(
        60.0, "Seconds that a client may leave its stream unread before it is ended.", "Service", gt=0
    )
    drain_delay: float = _option(
        0.0,
        "Seconds after SIGTERM in which new requests are still accepted (health is NOT_SERVING).",
        "Service",
        ge=0,
    )
    grace: float = _option(30.0, "Seconds after that in which running streams may finish.", "Service", ge=0)
    engine_restarts: int = _option(
        3,
        "How often in a row an engine that died is started again, after growing pauses; then the server ends.",
        "Service",
        ge=0,
    )
    step_timeout: float = _option(
        300.0,
        "Seconds without news of an engine that has work after which it is killed as hung; 0 is never.",
        "Service",
        ge=0,
    )
    trace_endpoint: str | None = _option(
        None,
        "Where to send traces, such as http://127.0.0.1:4318/v1/traces (OTLP over HTTP). Default: nowhere.",
        "Service",
    )
    log_level: LogLevel = _option("info", "debug, info, warning or error.", "Service")
    log_format: LogFormat = _option("console", "console for people, json for machines.", "Service")
    log_content: bool = _option(
        False, "Write prompts and answers to the log. They are personal data: for debugging only.", "Service"
    )

    tls_cert: Path | None = _option(
        None, "Certificate chain (PEM) of the server; turns TLS on. Read again when it changes.", "Security"
    )
    tls_key: Path | None = _option(None, "Its private key (PEM, without a password).", "Security")
    tls_client_ca: Path | None = _option(
        None, "Authorities (PEM) of client certificates; clients must show one of theirs.", "Security"
    )
    auth_tokens: Path | None = _option(
        None, "File (TOML) with bearer tokens and their limits; calls need one of them.", "Security"
    )
    health_port: Port = _option(
        0,
        "Port with nothing but health checks, never with TLS; 0 is off. For probes that know no TLS.",
        "Security",
    )
    admin_host: str = _option("127.0.0.1", "Address of the admin service.", "Admin")
    admin_port: Port = _option(0, "Port of the admin service; 0 is off.", "Admin")
    profile_directory: Path | None = _option(
        None, "Where the admin service may have traces of steps written. Default: nowhere.", "Admin"
    )

    keepalive_time: float = _option(
        60.0,
        "Seconds without news of a client after which it is asked whether it is there.",
        "Connections",
        gt=0,
        le=_MAX_GRPC_SECONDS,
    )
    keepalive_timeout: float = _option(
        20.0,
        "Seconds that it may take to answer before the connection is closed.",
        "Connections",
        gt=0,
        le=_MAX_GRPC_SECONDS,
    )
    max_connection_age: float = _option(
        0.0,
        "Seconds after which a client is asked to connect anew, so that balancers spread it; 0 is never. "
        "Streams that run go on.",
        "Connections",
        ge=0,
        le=_MAX_GRPC_SECONDS,
    )

    @property
    def engine(self) -> EngineConfig:
        """Raises ConfigError when a value is out of the engine's bounds."""
        return engine_config(
            model={
                "model": self.model,
                "served_name": self.served_model_name,
                "revision": self.revision,
                "tokenizer": self.tokenizer,
                "load_format": self.load_format,
                "dtype": self.dtype,
                "seed": self.seed,
            },
            cache={
                "block_size": self.block_size,
                "kv_cache_bytes": None if self.kv_cache_memory is None else int(self.kv_cache_memory),
                "planned_sequence_length": self.planned_sequence_length,
                "enable_prefix_cache": self.prefix_cache,
            },
            scheduler={
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "max_waiting": self.max_waiting,
            },
            speculators=self.speculators,
            attention_backend=self.attention_backend,
            cuda_graphs=self.cuda_graphs,
            numerics=self.numerics,
            draft_policy=self.draft_policy,
            verification=self.verification,
            allow_synthetic=self.allow_synthetic,
            synthetic_acceptance=self.synthetic_acceptance,
            device=self.device,
            max_model_len=self.max_model_len,
            max_steps_in_flight=self.max_steps_in_flight,
            num_threads=self.num_threads,
            profile_directory=None if self.profile_directory is None else str(self.profile_directory),
        )


def load_config(flags: dict[str, Any], file: Path | None = None) -> ServerConfig:
    """`flags` holds what was given on the command line. Raises ConfigError naming what is wrong."""
    _check_environment()
    try:
        config = _with_file(file)(**flags)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None
    if not config.model:
        raise ConfigError(f"model: got none, expected --model, {ENV_PREFIX}MODEL or `model` in a file")
    _check_security(config)
    config.engine  # noqa: B018 - validates the rest
    return config


def _check_environment() -> None:
    """A variable that is nearly a setting is a mistake. Others with our prefix may be anybody's: Kubernetes makes some
    for a Service of our name, clients have theirs.
    """
    settings = [(ENV_PREFIX + name).upper() for name in ServerConfig.model_fields]
    for name in map(str.upper, os.environ):
        if name.startswith(ENV_PREFIX) and name not in settings:
            for meant in get_close_matches(name, settings, n=1, cutoff=0.95):
                raise ConfigError(f"environment: got {name}, which is no setting; expected {meant}?")


def _check_security(config: ServerConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        missing = "tls_cert" if config.tls_cert is None else "tls_key"
        raise ConfigError(f"{missing}: got none, expected both a certificate and its key")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError(
            "tls_client_ca: got one without tls_cert, expected the server's certificate with it"
        )
    if config.gateway_port and config.gateway_protocol == "none":
        raise ConfigError(f"gateway_port: got {config.gateway_port} without gateway_protocol, expected both")
    if config.admin_port and config.auth_tokens is None and config.admin_host not in LOOPBACK_HOSTS:
        raise ConfigError(
            f"admin_host: got {config.admin_host!r} without auth_tokens, expected tokens, or one of "
            f"{', '.join(LOOPBACK_HOSTS)}: whoever reaches the admin service may stop the server"
        )


def _with_file(file: Path | None) -> type[ServerConfig]:
    """ServerConfig with the file as its last source."""
    if file is None:
        return ServerConfig
    values = _read_file(file)

    class FileConfig(ServerConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=values)

    return FileConfig


def _read_file(file: Path) -> dict[str, Any]:
    """Keys are the names of the fields, with - or _."""
    try:
        text = file.read_text(encoding="utf-8")
        match file.suffix:
            case ".toml":
                values = tomllib.loads(text)
            case ".yaml" | ".yml":
                values = yaml.safe_load(text) or {}
            case _:
                raise ConfigError(f"config: got {file}, expected a .toml, .yaml or .yml file")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config: cannot read {file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config: got {type(values).__name__} in {file}, expected keys with values")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
