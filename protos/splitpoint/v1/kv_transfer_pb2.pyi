from protos.splitpoint.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferGrant(_message.Message):
    __slots__ = ("transfer_id", "capability")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    capability: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ..., capability: _Optional[bytes] = ...) -> None: ...

class RankEndpoint(_message.Message):
    __slots__ = ("rank", "address", "host_id", "incarnation", "ucx_worker_address", "holding", "transport_addresses", "shared_staging")
    class TransportAddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UCX_WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SHARED_STAGING_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    host_id: str
    incarnation: str
    ucx_worker_address: bytes
    holding: KvHolding
    transport_addresses: _containers.ScalarMap[str, bytes]
    shared_staging: SharedStaging
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., ucx_worker_address: _Optional[bytes] = ..., holding: _Optional[_Union[KvHolding, _Mapping]] = ..., transport_addresses: _Optional[_Mapping[str, bytes]] = ..., shared_staging: _Optional[_Union[SharedStaging, _Mapping]] = ...) -> None: ...

class SharedStaging(_message.Message):
    __slots__ = ("descriptor", "address", "bytes", "token")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    descriptor: int
    address: int
    bytes: int
    token: bytes
    def __init__(self, descriptor: _Optional[int] = ..., address: _Optional[int] = ..., bytes: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class KvHolding(_message.Message):
    __slots__ = ("first_layer", "num_layers", "first_head", "num_heads")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ...) -> None: ...

class KvCompatibility(_message.Message):
    __slots__ = ("protocol_version", "model", "model_revision", "tokenizer_hash", "cache_dtype", "layout", "block_tokens", "num_layers", "num_kv_heads", "head_dim", "tensor_parallel_size", "pipeline_parallel_size", "engine", "block_bytes_per_layer", "total_kv_heads", "first_kv_head", "total_layers", "first_layer", "axes", "kernel_block_tokens", "packing")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model: str
    model_revision: str
    tokenizer_hash: str
    cache_dtype: str
    layout: str
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    engine: str
    block_bytes_per_layer: int
    total_kv_heads: int
    first_kv_head: int
    total_layers: int
    first_layer: int
    axes: str
    kernel_block_tokens: int
    packing: str
    def __init__(self, protocol_version: _Optional[int] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., cache_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., engine: _Optional[str] = ..., block_bytes_per_layer: _Optional[int] = ..., total_kv_heads: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., total_layers: _Optional[int] = ..., first_layer: _Optional[int] = ..., axes: _Optional[str] = ..., kernel_block_tokens: _Optional[int] = ..., packing: _Optional[str] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("transfer_id", "prompt_tokens", "token_hash", "fingerprint", "incarnation", "num_chunks", "bytes", "rank", "ranks")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    prompt_tokens: int
    token_hash: bytes
    fingerprint: bytes
    incarnation: str
    num_chunks: int
    bytes: int
    rank: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankSeal]
    def __init__(self, transfer_id: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., token_hash: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., incarnation: _Optional[str] = ..., num_chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., rank: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankSeal, _Mapping]]] = ...) -> None: ...

class RankSeal(_message.Message):
    __slots__ = ("rank", "fingerprint", "bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    fingerprint: bytes
    bytes: int
    def __init__(self, rank: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("protocol_version", "fingerprint", "expected_incarnation", "compatibility")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    fingerprint: bytes
    expected_incarnation: str
    compatibility: KvCompatibility
    def __init__(self, protocol_version: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., expected_incarnation: _Optional[str] = ..., compatibility: _Optional[_Union[KvCompatibility, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("accepted", "mismatch", "endpoint", "compatibility")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    mismatch: str
    endpoint: RankEndpoint
    compatibility: KvCompatibility
    def __init__(self, accepted: _Optional[bool] = ..., mismatch: _Optional[str] = ..., endpoint: _Optional[_Union[RankEndpoint, _Mapping]] = ..., compatibility: _Optional[_Union[KvCompatibility, _Mapping]] = ...) -> None: ...

class Checksum(_message.Message):
    __slots__ = ("algorithm", "value")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    value: int
    def __init__(self, algorithm: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("transfer_id", "generation", "index", "first_block", "num_blocks", "offset", "bytes", "checksum", "last", "seal", "tag", "address")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    generation: int
    index: int
    first_block: int
    num_blocks: int
    offset: int
    bytes: int
    checksum: Checksum
    last: bool
    seal: Seal
    tag: int
    address: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., index: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[_Union[Checksum, _Mapping]] = ..., last: _Optional[bool] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., tag: _Optional[int] = ..., address: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("grant", "attempt_id", "sender_incarnation", "receiver_incarnation", "transport", "ucx_worker_address", "receiver_host_id", "remaining_s", "receiver_rank", "receivers", "share", "max_chunk_bytes", "transport_address", "token_hash", "cut", "takes_announcements")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    UCX_WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_HOST_ID_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_RANK_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    TAKES_ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    grant: TransferGrant
    attempt_id: str
    sender_incarnation: str
    receiver_incarnation: str
    transport: str
    ucx_worker_address: bytes
    receiver_host_id: str
    remaining_s: float
    receiver_rank: int
    receivers: int
    share: KvHolding
    max_chunk_bytes: int
    transport_address: bytes
    token_hash: bytes
    cut: bool
    takes_announcements: bool
    def __init__(self, grant: _Optional[_Union[TransferGrant, _Mapping]] = ..., attempt_id: _Optional[str] = ..., sender_incarnation: _Optional[str] = ..., receiver_incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., ucx_worker_address: _Optional[bytes] = ..., receiver_host_id: _Optional[str] = ..., remaining_s: _Optional[float] = ..., receiver_rank: _Optional[int] = ..., receivers: _Optional[int] = ..., share: _Optional[_Union[KvHolding, _Mapping]] = ..., max_chunk_bytes: _Optional[int] = ..., transport_address: _Optional[bytes] = ..., token_hash: _Optional[bytes] = ..., cut: _Optional[bool] = ..., takes_announcements: _Optional[bool] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: ChunkHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[ChunkHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FetchAnswer(_message.Message):
    __slots__ = ("header", "error", "soon", "proof", "announced", "checksum")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SOON_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    header: ChunkHeader
    error: _common_pb2.ErrorDetail
    soon: bool
    proof: bytes
    announced: bool
    checksum: ChunkChecksum
    def __init__(self, header: _Optional[_Union[ChunkHeader, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., soon: _Optional[bool] = ..., proof: _Optional[bytes] = ..., announced: _Optional[bool] = ..., checksum: _Optional[_Union[ChunkChecksum, _Mapping]] = ...) -> None: ...

class ChunkChecksum(_message.Message):
    __slots__ = ("index", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    checksum: Checksum
    def __init__(self, index: _Optional[int] = ..., checksum: _Optional[_Union[Checksum, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("incarnation", "expected_incarnation", "rank")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    expected_incarnation: str
    rank: int
    def __init__(self, incarnation: _Optional[str] = ..., expected_incarnation: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("grant", "outcome", "receiver_rank")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_RANK_FIELD_NUMBER: _ClassVar[int]
    grant: TransferGrant
    outcome: str
    receiver_rank: int
    def __init__(self, grant: _Optional[_Union[TransferGrant, _Mapping]] = ..., outcome: _Optional[str] = ..., receiver_rank: _Optional[int] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("grant", "prompt_tokens", "token_hash", "remaining_s", "staging_wait_s")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    STAGING_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    grant: TransferGrant
    prompt_tokens: int
    token_hash: bytes
    remaining_s: float
    staging_wait_s: float
    def __init__(self, grant: _Optional[_Union[TransferGrant, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., token_hash: _Optional[bytes] = ..., remaining_s: _Optional[float] = ..., staging_wait_s: _Optional[float] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("grant", "attempt_id", "sender", "prompt_tokens", "token_hash", "transport", "remaining_s", "staging_wait_s", "senders", "receivers")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    STAGING_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    grant: TransferGrant
    attempt_id: str
    sender: RankEndpoint
    prompt_tokens: int
    token_hash: bytes
    transport: str
    remaining_s: float
    staging_wait_s: float
    senders: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    receivers: _containers.RepeatedCompositeFieldContainer[KvHolding]
    def __init__(self, grant: _Optional[_Union[TransferGrant, _Mapping]] = ..., attempt_id: _Optional[str] = ..., sender: _Optional[_Union[RankEndpoint, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., token_hash: _Optional[bytes] = ..., transport: _Optional[str] = ..., remaining_s: _Optional[float] = ..., staging_wait_s: _Optional[float] = ..., senders: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ..., receivers: _Optional[_Iterable[_Union[KvHolding, _Mapping]]] = ...) -> None: ...

class PreparePullRequest(_message.Message):
    __slots__ = ("pull",)
    PULL_FIELD_NUMBER: _ClassVar[int]
    pull: PullRequest
    def __init__(self, pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class PreparePullResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("seal", "bytes", "seconds", "transport", "seals", "total_s")
    SEAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SEALS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    seal: Seal
    bytes: int
    seconds: float
    transport: str
    seals: _containers.RepeatedCompositeFieldContainer[Seal]
    total_s: float
    def __init__(self, seal: _Optional[_Union[Seal, _Mapping]] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., transport: _Optional[str] = ..., seals: _Optional[_Iterable[_Union[Seal, _Mapping]]] = ..., total_s: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    reason: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class GetNodeStatusRequest(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: bool
    def __init__(self, metrics: _Optional[bool] = ...) -> None: ...

class StagingStatus(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "quarantined_bytes")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ...) -> None: ...

class GetNodeStatusResponse(_message.Message):
    __slots__ = ("send", "receive", "leases", "sessions", "counters", "recent_errors", "tasks", "lease_states", "session_states", "pack", "metrics_text", "device_memory_bytes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LeaseStatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SessionStatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEND_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RECENT_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_STATES_FIELD_NUMBER: _ClassVar[int]
    SESSION_STATES_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    METRICS_TEXT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    send: StagingStatus
    receive: StagingStatus
    leases: int
    sessions: int
    counters: _containers.ScalarMap[str, int]
    recent_errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorDetail]
    tasks: int
    lease_states: _containers.ScalarMap[str, int]
    session_states: _containers.ScalarMap[str, int]
    pack: StagingStatus
    metrics_text: bytes
    device_memory_bytes: int
    def __init__(self, send: _Optional[_Union[StagingStatus, _Mapping]] = ..., receive: _Optional[_Union[StagingStatus, _Mapping]] = ..., leases: _Optional[int] = ..., sessions: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., recent_errors: _Optional[_Iterable[_Union[_common_pb2.ErrorDetail, _Mapping]]] = ..., tasks: _Optional[int] = ..., lease_states: _Optional[_Mapping[str, int]] = ..., session_states: _Optional[_Mapping[str, int]] = ..., pack: _Optional[_Union[StagingStatus, _Mapping]] = ..., metrics_text: _Optional[bytes] = ..., device_memory_bytes: _Optional[int] = ...) -> None: ...

class FencePeerRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class FencePeerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
