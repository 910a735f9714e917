from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_LEVEL_UNSPECIFIED: _ClassVar[LogLevel]
    LOG_LEVEL_DEBUG: _ClassVar[LogLevel]
    LOG_LEVEL_INFO: _ClassVar[LogLevel]
    LOG_LEVEL_WARNING: _ClassVar[LogLevel]
    LOG_LEVEL_ERROR: _ClassVar[LogLevel]
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_WARNING: LogLevel
LOG_LEVEL_ERROR: LogLevel

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: LogLevel
    def __init__(self, level: _Optional[_Union[LogLevel, str]] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Speculator(_message.Message):
    __slots__ = ("method", "enabled", "num_speculative_tokens", "max_speculative_tokens")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: str
    enabled: bool
    num_speculative_tokens: int
    max_speculative_tokens: int
    def __init__(self, method: _Optional[str] = ..., enabled: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., max_speculative_tokens: _Optional[int] = ...) -> None: ...

class ListSpeculatorsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSpeculatorsResponse(_message.Message):
    __slots__ = ("speculators", "default_method")
    SPECULATORS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    speculators: _containers.RepeatedCompositeFieldContainer[Speculator]
    default_method: str
    def __init__(self, speculators: _Optional[_Iterable[_Union[Speculator, _Mapping]]] = ..., default_method: _Optional[str] = ...) -> None: ...

class SpeculatorSettings(_message.Message):
    __slots__ = ("method", "enabled", "num_speculative_tokens")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: str
    enabled: bool
    num_speculative_tokens: int
    def __init__(self, method: _Optional[str] = ..., enabled: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ...) -> None: ...

class ConfigureSpeculationRequest(_message.Message):
    __slots__ = ("speculators", "default_method")
    SPECULATORS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    speculators: _containers.RepeatedCompositeFieldContainer[SpeculatorSettings]
    default_method: str
    def __init__(self, speculators: _Optional[_Iterable[_Union[SpeculatorSettings, _Mapping]]] = ..., default_method: _Optional[str] = ...) -> None: ...

class ConfigureSpeculationResponse(_message.Message):
    __slots__ = ("speculators", "default_method")
    SPECULATORS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    speculators: _containers.RepeatedCompositeFieldContainer[Speculator]
    default_method: str
    def __init__(self, speculators: _Optional[_Iterable[_Union[Speculator, _Mapping]]] = ..., default_method: _Optional[str] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class DumpSchedulerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpSchedulerResponse(_message.Message):
    __slots__ = ("requests", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_preemptions_total", "num_steps_in_flight")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ScheduledRequest]
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions_total: int
    num_steps_in_flight: int
    def __init__(self, requests: _Optional[_Iterable[_Union[ScheduledRequest, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_preemptions_total: _Optional[int] = ..., num_steps_in_flight: _Optional[int] = ...) -> None: ...

class ScheduledRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "status", "priority", "age", "prompt_tokens", "output_tokens", "computed_tokens", "in_flight_tokens", "cached_tokens", "preemptions", "draft_method")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_METHOD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    status: str
    priority: int
    age: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    in_flight_tokens: int
    cached_tokens: int
    preemptions: int
    draft_method: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., status: _Optional[str] = ..., priority: _Optional[int] = ..., age: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., in_flight_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., draft_method: _Optional[str] = ...) -> None: ...
