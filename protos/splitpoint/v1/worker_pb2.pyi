from protos.splitpoint.v1 import common_pb2 as _common_pb2
from protos.splitpoint.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LegHeader(_message.Message):
    __slots__ = ("request_id", "attempt_id", "remaining_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt_id: str
    remaining_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., remaining_s: _Optional[float] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("prefill", "prepare", "decode", "colocated", "abort", "release")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillLeg
    prepare: PrepareLeg
    decode: DecodeLeg
    colocated: ColocatedLeg
    abort: AbortLeg
    release: ReleaseLeg
    def __init__(self, prefill: _Optional[_Union[PrefillLeg, _Mapping]] = ..., prepare: _Optional[_Union[PrepareLeg, _Mapping]] = ..., decode: _Optional[_Union[DecodeLeg, _Mapping]] = ..., colocated: _Optional[_Union[ColocatedLeg, _Mapping]] = ..., abort: _Optional[_Union[AbortLeg, _Mapping]] = ..., release: _Optional[_Union[ReleaseLeg, _Mapping]] = ...) -> None: ...

class PrefillLeg(_message.Message):
    __slots__ = ("header", "prompt_token_ids", "sampling_params", "grant")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    header: LegHeader
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    grant: _kv_transfer_pb2.TransferGrant
    def __init__(self, header: _Optional[_Union[LegHeader, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., grant: _Optional[_Union[_kv_transfer_pb2.TransferGrant, _Mapping]] = ...) -> None: ...

class PrepareLeg(_message.Message):
    __slots__ = ("header", "grant", "prefill_ranks", "prefill_incarnation", "prompt_tokens", "transport", "token_hash")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    header: LegHeader
    grant: _kv_transfer_pb2.TransferGrant
    prefill_ranks: _containers.RepeatedCompositeFieldContainer[_kv_transfer_pb2.RankEndpoint]
    prefill_incarnation: str
    prompt_tokens: int
    transport: str
    token_hash: bytes
    def __init__(self, header: _Optional[_Union[LegHeader, _Mapping]] = ..., grant: _Optional[_Union[_kv_transfer_pb2.TransferGrant, _Mapping]] = ..., prefill_ranks: _Optional[_Iterable[_Union[_kv_transfer_pb2.RankEndpoint, _Mapping]]] = ..., prefill_incarnation: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., transport: _Optional[str] = ..., token_hash: _Optional[bytes] = ...) -> None: ...

class DecodeLeg(_message.Message):
    __slots__ = ("header", "transfer_id", "seal", "prompt_token_ids", "output_token_ids", "sampling_params", "allow_recompute")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    header: LegHeader
    transfer_id: bytes
    seal: _kv_transfer_pb2.Seal
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    allow_recompute: bool
    def __init__(self, header: _Optional[_Union[LegHeader, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., seal: _Optional[_Union[_kv_transfer_pb2.Seal, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., allow_recompute: _Optional[bool] = ...) -> None: ...

class ColocatedLeg(_message.Message):
    __slots__ = ("header", "prompt_token_ids", "sampling_params")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    header: LegHeader
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    def __init__(self, header: _Optional[_Union[LegHeader, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class AbortLeg(_message.Message):
    __slots__ = ("attempt_id", "reason")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    reason: str
    def __init__(self, attempt_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseLeg(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    reason: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class StreamResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[LegEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[LegEvent, _Mapping]]] = ...) -> None: ...

class LegEvent(_message.Message):
    __slots__ = ("attempt_id", "tokens", "sealed", "staged", "finished", "failed")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    tokens: TokensEvent
    sealed: SealedEvent
    staged: StagedEvent
    finished: FinishedEvent
    failed: _common_pb2.ErrorDetail
    def __init__(self, attempt_id: _Optional[str] = ..., tokens: _Optional[_Union[TokensEvent, _Mapping]] = ..., sealed: _Optional[_Union[SealedEvent, _Mapping]] = ..., staged: _Optional[_Union[StagedEvent, _Mapping]] = ..., finished: _Optional[_Union[FinishedEvent, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class TokensEvent(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs", "cached_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    cached_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SealedEvent(_message.Message):
    __slots__ = ("first", "seal", "times")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    first: TokensEvent
    seal: _kv_transfer_pb2.Seal
    times: LegTimes
    def __init__(self, first: _Optional[_Union[TokensEvent, _Mapping]] = ..., seal: _Optional[_Union[_kv_transfer_pb2.Seal, _Mapping]] = ..., times: _Optional[_Union[LegTimes, _Mapping]] = ...) -> None: ...

class StagedEvent(_message.Message):
    __slots__ = ("bytes", "seconds", "transport")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    transport: str
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class FinishedEvent(_message.Message):
    __slots__ = ("finish_reason", "matched_token_id", "last", "times", "recomputed")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    matched_token_id: int
    last: TokensEvent
    times: LegTimes
    recomputed: bool
    def __init__(self, finish_reason: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., last: _Optional[_Union[TokensEvent, _Mapping]] = ..., times: _Optional[_Union[LegTimes, _Mapping]] = ..., recomputed: _Optional[bool] = ...) -> None: ...

class LegTimes(_message.Message):
    __slots__ = ("queued_s", "computing_s", "decoding_s", "transfer_wait_s", "transfer_s", "transfer_bytes", "returning_s", "elapsed_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    DECODING_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETURNING_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    computing_s: float
    decoding_s: float
    transfer_wait_s: float
    transfer_s: float
    transfer_bytes: int
    returning_s: float
    elapsed_s: float
    def __init__(self, queued_s: _Optional[float] = ..., computing_s: _Optional[float] = ..., decoding_s: _Optional[float] = ..., transfer_wait_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., returning_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class DescribeWorkerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeWorkerResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model", "compatibility", "ranks", "max_model_len", "max_transfer_tokens", "transports")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_TRANSFER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    model: str
    compatibility: _kv_transfer_pb2.KvCompatibility
    ranks: _containers.RepeatedCompositeFieldContainer[_kv_transfer_pb2.RankEndpoint]
    max_model_len: int
    max_transfer_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., compatibility: _Optional[_Union[_kv_transfer_pb2.KvCompatibility, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_kv_transfer_pb2.RankEndpoint, _Mapping]]] = ..., max_model_len: _Optional[int] = ..., max_transfer_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterRankRequest(_message.Message):
    __slots__ = ("endpoint", "compatibility", "world_size", "send_staging_bytes", "receive_staging_bytes", "bytes_per_block", "transports")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEND_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    endpoint: _kv_transfer_pb2.RankEndpoint
    compatibility: _kv_transfer_pb2.KvCompatibility
    world_size: int
    send_staging_bytes: int
    receive_staging_bytes: int
    bytes_per_block: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, endpoint: _Optional[_Union[_kv_transfer_pb2.RankEndpoint, _Mapping]] = ..., compatibility: _Optional[_Union[_kv_transfer_pb2.KvCompatibility, _Mapping]] = ..., world_size: _Optional[int] = ..., send_staging_bytes: _Optional[int] = ..., receive_staging_bytes: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterRankResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
