from protos.splitpoint.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "pool", "role", "state", "incarnation", "address", "running", "waiting", "leases", "kv_usage", "heartbeat_age_s", "pid", "detail", "resources", "transports", "metrics_address", "former_legs", "cordoned", "node_id", "rack", "spare", "silent")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FORMER_LEGS_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    role: str
    state: str
    incarnation: str
    address: str
    running: int
    waiting: int
    leases: int
    kv_usage: float
    heartbeat_age_s: float
    pid: int
    detail: str
    resources: WorkerResources
    transports: _containers.RepeatedScalarFieldContainer[str]
    metrics_address: str
    former_legs: int
    cordoned: bool
    node_id: str
    rack: str
    spare: bool
    silent: bool
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., leases: _Optional[int] = ..., kv_usage: _Optional[float] = ..., heartbeat_age_s: _Optional[float] = ..., pid: _Optional[int] = ..., detail: _Optional[str] = ..., resources: _Optional[_Union[WorkerResources, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., metrics_address: _Optional[str] = ..., former_legs: _Optional[int] = ..., cordoned: _Optional[bool] = ..., node_id: _Optional[str] = ..., rack: _Optional[str] = ..., spare: _Optional[bool] = ..., silent: _Optional[bool] = ...) -> None: ...

class WorkerResources(_message.Message):
    __slots__ = ("kv_blocks_held", "legs", "leases", "sessions", "send_staging", "receive_staging", "tasks", "open_files", "pids", "lease_states", "session_states", "memory_bytes", "device_memory_bytes")
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
    KV_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SEND_STAGING_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_STAGING_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_STATES_FIELD_NUMBER: _ClassVar[int]
    SESSION_STATES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_blocks_held: int
    legs: int
    leases: int
    sessions: int
    send_staging: _kv_transfer_pb2.StagingStatus
    receive_staging: _kv_transfer_pb2.StagingStatus
    tasks: int
    open_files: int
    pids: _containers.RepeatedScalarFieldContainer[int]
    lease_states: _containers.ScalarMap[str, int]
    session_states: _containers.ScalarMap[str, int]
    memory_bytes: int
    device_memory_bytes: int
    def __init__(self, kv_blocks_held: _Optional[int] = ..., legs: _Optional[int] = ..., leases: _Optional[int] = ..., sessions: _Optional[int] = ..., send_staging: _Optional[_Union[_kv_transfer_pb2.StagingStatus, _Mapping]] = ..., receive_staging: _Optional[_Union[_kv_transfer_pb2.StagingStatus, _Mapping]] = ..., tasks: _Optional[int] = ..., open_files: _Optional[int] = ..., pids: _Optional[_Iterable[int]] = ..., lease_states: _Optional[_Mapping[str, int]] = ..., session_states: _Optional[_Mapping[str, int]] = ..., memory_bytes: _Optional[int] = ..., device_memory_bytes: _Optional[int] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("name", "role", "target", "ready", "starting", "draining", "failures", "detail", "engine_json", "spares", "spares_ready", "spare_kind", "updated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JSON_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    SPARES_READY_FIELD_NUMBER: _ClassVar[int]
    SPARE_KIND_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    target: int
    ready: int
    starting: int
    draining: int
    failures: int
    detail: str
    engine_json: str
    spares: int
    spares_ready: int
    spare_kind: str
    updated: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., target: _Optional[int] = ..., ready: _Optional[int] = ..., starting: _Optional[int] = ..., draining: _Optional[int] = ..., failures: _Optional[int] = ..., detail: _Optional[str] = ..., engine_json: _Optional[str] = ..., spares: _Optional[int] = ..., spares_ready: _Optional[int] = ..., spare_kind: _Optional[str] = ..., updated: _Optional[int] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "http_address", "grpc_address", "admin_address", "in_flight", "pid", "tasks", "open_files", "open_circuits", "admin_http_address", "node_id", "detail")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    OPEN_CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    http_address: str
    grpc_address: str
    admin_address: str
    in_flight: int
    pid: int
    tasks: int
    open_files: int
    open_circuits: _containers.RepeatedScalarFieldContainer[str]
    admin_http_address: str
    node_id: str
    detail: str
    def __init__(self, gateway_id: _Optional[str] = ..., http_address: _Optional[str] = ..., grpc_address: _Optional[str] = ..., admin_address: _Optional[str] = ..., in_flight: _Optional[int] = ..., pid: _Optional[int] = ..., tasks: _Optional[int] = ..., open_files: _Optional[int] = ..., open_circuits: _Optional[_Iterable[str]] = ..., admin_http_address: _Optional[str] = ..., node_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("pools", "workers", "gateways", "model", "version", "unsettled", "autoscaling", "advisor")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    AUTOSCALING_FIELD_NUMBER: _ClassVar[int]
    ADVISOR_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    model: str
    version: int
    unsettled: _containers.RepeatedScalarFieldContainer[str]
    autoscaling: Autoscaling
    advisor: AdvisorStatus
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ..., model: _Optional[str] = ..., version: _Optional[int] = ..., unsettled: _Optional[_Iterable[str]] = ..., autoscaling: _Optional[_Union[Autoscaling, _Mapping]] = ..., advisor: _Optional[_Union[AdvisorStatus, _Mapping]] = ...) -> None: ...

class ScalePoolRequest(_message.Message):
    __slots__ = ("pool", "replicas", "current_replicas", "dry_run", "expected_version", "force")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    current_replicas: int
    dry_run: bool
    expected_version: int
    force: bool
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ..., current_replicas: _Optional[int] = ..., dry_run: _Optional[bool] = ..., expected_version: _Optional[int] = ..., force: _Optional[bool] = ...) -> None: ...

class ScalePoolResponse(_message.Message):
    __slots__ = ("pool", "plan", "version")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    pool: PoolStatus
    plan: _containers.RepeatedCompositeFieldContainer[WorkerPlan]
    version: int
    def __init__(self, pool: _Optional[_Union[PoolStatus, _Mapping]] = ..., plan: _Optional[_Iterable[_Union[WorkerPlan, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class PoolSpec(_message.Message):
    __slots__ = ("name", "role", "replicas", "engine_json", "spares", "spare_kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JSON_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    SPARE_KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    replicas: int
    engine_json: str
    spares: int
    spare_kind: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., replicas: _Optional[int] = ..., engine_json: _Optional[str] = ..., spares: _Optional[int] = ..., spare_kind: _Optional[str] = ...) -> None: ...

class ApplyPoolsRequest(_message.Message):
    __slots__ = ("pools", "dry_run", "expected_version", "max_unavailable", "surge")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SURGE_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSpec]
    dry_run: bool
    expected_version: int
    max_unavailable: float
    surge: bool
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSpec, _Mapping]]] = ..., dry_run: _Optional[bool] = ..., expected_version: _Optional[int] = ..., max_unavailable: _Optional[float] = ..., surge: _Optional[bool] = ...) -> None: ...

class ApplyPoolsResponse(_message.Message):
    __slots__ = ("plan", "version")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    plan: _containers.RepeatedCompositeFieldContainer[WorkerPlan]
    version: int
    def __init__(self, plan: _Optional[_Iterable[_Union[WorkerPlan, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class WorkerPlan(_message.Message):
    __slots__ = ("action", "worker_id", "pool", "new_pool", "reason")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NEW_POOL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    action: str
    worker_id: str
    pool: str
    new_pool: str
    reason: str
    def __init__(self, action: _Optional[str] = ..., worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., new_pool: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AutoscalePolicy(_message.Message):
    __slots__ = ("min_replicas", "max_replicas", "target_ongoing_requests", "target_queued_tokens", "target_kv_usage", "target_decode_batch", "ttft_goal_s", "tpot_goal_s", "target_attainment", "upscale_delay_s", "downscale_delay_s", "downscale_to_zero_delay_s", "metrics_interval_s", "look_back_period_s", "aggregation_function", "upscaling_factor", "downscaling_factor", "tolerance")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ONGOING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TARGET_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_DECODE_BATCH_FIELD_NUMBER: _ClassVar[int]
    TTFT_GOAL_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_GOAL_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    UPSCALE_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    DOWNSCALE_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    DOWNSCALE_TO_ZERO_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    LOOK_BACK_PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    UPSCALING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    DOWNSCALING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float
    target_queued_tokens: float
    target_kv_usage: float
    target_decode_batch: float
    ttft_goal_s: float
    tpot_goal_s: float
    target_attainment: float
    upscale_delay_s: float
    downscale_delay_s: float
    downscale_to_zero_delay_s: float
    metrics_interval_s: float
    look_back_period_s: float
    aggregation_function: str
    upscaling_factor: float
    downscaling_factor: float
    tolerance: float
    def __init__(self, min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., target_ongoing_requests: _Optional[float] = ..., target_queued_tokens: _Optional[float] = ..., target_kv_usage: _Optional[float] = ..., target_decode_batch: _Optional[float] = ..., ttft_goal_s: _Optional[float] = ..., tpot_goal_s: _Optional[float] = ..., target_attainment: _Optional[float] = ..., upscale_delay_s: _Optional[float] = ..., downscale_delay_s: _Optional[float] = ..., downscale_to_zero_delay_s: _Optional[float] = ..., metrics_interval_s: _Optional[float] = ..., look_back_period_s: _Optional[float] = ..., aggregation_function: _Optional[str] = ..., upscaling_factor: _Optional[float] = ..., downscaling_factor: _Optional[float] = ..., tolerance: _Optional[float] = ...) -> None: ...

class AutoscaleSignal(_message.Message):
    __slots__ = ("name", "value", "target", "wanted_replicas", "samples")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WANTED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    target: float
    wanted_replicas: int
    samples: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., target: _Optional[float] = ..., wanted_replicas: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class AutoscaleDecision(_message.Message):
    __slots__ = ("action", "current_replicas", "replicas", "wanted_replicas", "reason", "signals", "age_s")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WANTED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    action: str
    current_replicas: int
    replicas: int
    wanted_replicas: int
    reason: str
    signals: _containers.RepeatedCompositeFieldContainer[AutoscaleSignal]
    age_s: float
    def __init__(self, action: _Optional[str] = ..., current_replicas: _Optional[int] = ..., replicas: _Optional[int] = ..., wanted_replicas: _Optional[int] = ..., reason: _Optional[str] = ..., signals: _Optional[_Iterable[_Union[AutoscaleSignal, _Mapping]]] = ..., age_s: _Optional[float] = ...) -> None: ...

class AutoscalerStatus(_message.Message):
    __slots__ = ("pool", "policy", "decision")
    POOL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    policy: AutoscalePolicy
    decision: AutoscaleDecision
    def __init__(self, pool: _Optional[str] = ..., policy: _Optional[_Union[AutoscalePolicy, _Mapping]] = ..., decision: _Optional[_Union[AutoscaleDecision, _Mapping]] = ...) -> None: ...

class AcceleratorGain(_message.Message):
    __slots__ = ("pool", "goodput_per_s", "workers", "accelerators", "legs_per_s", "share_now", "share_more", "partner_share", "basis")
    POOL_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_PER_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    LEGS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_NOW_FIELD_NUMBER: _ClassVar[int]
    SHARE_MORE_FIELD_NUMBER: _ClassVar[int]
    PARTNER_SHARE_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    goodput_per_s: float
    workers: int
    accelerators: int
    legs_per_s: float
    share_now: float
    share_more: float
    partner_share: float
    basis: str
    def __init__(self, pool: _Optional[str] = ..., goodput_per_s: _Optional[float] = ..., workers: _Optional[int] = ..., accelerators: _Optional[int] = ..., legs_per_s: _Optional[float] = ..., share_now: _Optional[float] = ..., share_more: _Optional[float] = ..., partner_share: _Optional[float] = ..., basis: _Optional[str] = ...) -> None: ...

class Autoscaling(_message.Message):
    __slots__ = ("autoscalers", "next", "accelerators_taken", "accelerator_budget")
    AUTOSCALERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_BUDGET_FIELD_NUMBER: _ClassVar[int]
    autoscalers: _containers.RepeatedCompositeFieldContainer[AutoscalerStatus]
    next: _containers.RepeatedCompositeFieldContainer[AcceleratorGain]
    accelerators_taken: int
    accelerator_budget: int
    def __init__(self, autoscalers: _Optional[_Iterable[_Union[AutoscalerStatus, _Mapping]]] = ..., next: _Optional[_Iterable[_Union[AcceleratorGain, _Mapping]]] = ..., accelerators_taken: _Optional[int] = ..., accelerator_budget: _Optional[int] = ...) -> None: ...

class AdvisorMove(_message.Message):
    __slots__ = ("pool", "current_replicas", "replicas")
    POOL_FIELD_NUMBER: _ClassVar[int]
    CURRENT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    current_replicas: int
    replicas: int
    def __init__(self, pool: _Optional[str] = ..., current_replicas: _Optional[int] = ..., replicas: _Optional[int] = ...) -> None: ...

class AdvisorProposal(_message.Message):
    __slots__ = ("pools", "mode", "how", "goodput_now_per_s", "goodput_then_per_s", "goodput_meanwhile_per_s", "cost_s", "cost_requests", "gain_requests")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_NOW_PER_S_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_THEN_PER_S_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_MEANWHILE_PER_S_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    COST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GAIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[AdvisorMove]
    mode: str
    how: str
    goodput_now_per_s: float
    goodput_then_per_s: float
    goodput_meanwhile_per_s: float
    cost_s: float
    cost_requests: float
    gain_requests: float
    def __init__(self, pools: _Optional[_Iterable[_Union[AdvisorMove, _Mapping]]] = ..., mode: _Optional[str] = ..., how: _Optional[str] = ..., goodput_now_per_s: _Optional[float] = ..., goodput_then_per_s: _Optional[float] = ..., goodput_meanwhile_per_s: _Optional[float] = ..., cost_s: _Optional[float] = ..., cost_requests: _Optional[float] = ..., gain_requests: _Optional[float] = ...) -> None: ...

class AdvisorPhase(_message.Message):
    __slots__ = ("role", "workers", "legs_per_s", "attainment", "queued_tokens", "kv_usage", "decode_batch")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEGS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    DECODE_BATCH_FIELD_NUMBER: _ClassVar[int]
    role: str
    workers: int
    legs_per_s: float
    attainment: float
    queued_tokens: float
    kv_usage: float
    decode_batch: float
    def __init__(self, role: _Optional[str] = ..., workers: _Optional[int] = ..., legs_per_s: _Optional[float] = ..., attainment: _Optional[float] = ..., queued_tokens: _Optional[float] = ..., kv_usage: _Optional[float] = ..., decode_batch: _Optional[float] = ...) -> None: ...

class AdvisorCost(_message.Message):
    __slots__ = ("how", "cost_s", "measured_changes")
    HOW_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_CHANGES_FIELD_NUMBER: _ClassVar[int]
    how: str
    cost_s: float
    measured_changes: int
    def __init__(self, how: _Optional[str] = ..., cost_s: _Optional[float] = ..., measured_changes: _Optional[int] = ...) -> None: ...

class AdvisorStatus(_message.Message):
    __slots__ = ("enabled", "apply", "action", "reason", "age_s", "mode", "goodput_per_s", "rate_per_s", "prompt_tokens", "output_tokens", "ttft_goal_s", "tpot_goal_s", "phases", "proposal", "pending", "dwell_left_s", "backoff_left_s", "rollbacks", "costs", "evidence")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_PER_S_FIELD_NUMBER: _ClassVar[int]
    RATE_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_GOAL_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_GOAL_S_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    DWELL_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    apply: bool
    action: str
    reason: str
    age_s: float
    mode: str
    goodput_per_s: float
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float
    ttft_goal_s: float
    tpot_goal_s: float
    phases: _containers.RepeatedCompositeFieldContainer[AdvisorPhase]
    proposal: AdvisorProposal
    pending: _containers.RepeatedCompositeFieldContainer[AdvisorMove]
    dwell_left_s: float
    backoff_left_s: float
    rollbacks: int
    costs: _containers.RepeatedCompositeFieldContainer[AdvisorCost]
    evidence: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, enabled: _Optional[bool] = ..., apply: _Optional[bool] = ..., action: _Optional[str] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., mode: _Optional[str] = ..., goodput_per_s: _Optional[float] = ..., rate_per_s: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., output_tokens: _Optional[float] = ..., ttft_goal_s: _Optional[float] = ..., tpot_goal_s: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[AdvisorPhase, _Mapping]]] = ..., proposal: _Optional[_Union[AdvisorProposal, _Mapping]] = ..., pending: _Optional[_Iterable[_Union[AdvisorMove, _Mapping]]] = ..., dwell_left_s: _Optional[float] = ..., backoff_left_s: _Optional[float] = ..., rollbacks: _Optional[int] = ..., costs: _Optional[_Iterable[_Union[AdvisorCost, _Mapping]]] = ..., evidence: _Optional[_Iterable[str]] = ...) -> None: ...

class SetAutoscalerRequest(_message.Message):
    __slots__ = ("pool", "policy", "dry_run", "accelerator_budget")
    POOL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_BUDGET_FIELD_NUMBER: _ClassVar[int]
    pool: str
    policy: AutoscalePolicy
    dry_run: bool
    accelerator_budget: int
    def __init__(self, pool: _Optional[str] = ..., policy: _Optional[_Union[AutoscalePolicy, _Mapping]] = ..., dry_run: _Optional[bool] = ..., accelerator_budget: _Optional[int] = ...) -> None: ...

class SetAutoscalerResponse(_message.Message):
    __slots__ = ("autoscaler",)
    AUTOSCALER_FIELD_NUMBER: _ClassVar[int]
    autoscaler: AutoscalerStatus
    def __init__(self, autoscaler: _Optional[_Union[AutoscalerStatus, _Mapping]] = ...) -> None: ...

class RemoveAutoscalerRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class RemoveAutoscalerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerStatus
    def __init__(self, worker: _Optional[_Union[WorkerStatus, _Mapping]] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("pools", "gateways", "surge")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    SURGE_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedScalarFieldContainer[str]
    gateways: bool
    surge: bool
    def __init__(self, pools: _Optional[_Iterable[str]] = ..., gateways: _Optional[bool] = ..., surge: _Optional[bool] = ...) -> None: ...

class RestartResponse(_message.Message):
    __slots__ = ("workers", "gateways")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    gateways: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[str]] = ..., gateways: _Optional[_Iterable[str]] = ...) -> None: ...

class CordonWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "cordoned")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    cordoned: bool
    def __init__(self, worker_id: _Optional[str] = ..., cordoned: _Optional[bool] = ...) -> None: ...

class CordonWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerStatus
    def __init__(self, worker: _Optional[_Union[WorkerStatus, _Mapping]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestStatus(_message.Message):
    __slots__ = ("request_id", "client_request_id", "path", "transport", "prefill_worker", "decode_worker", "prompt_tokens", "attempts", "age_s", "ttft_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    client_request_id: str
    path: str
    transport: str
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    attempts: int
    age_s: float
    ttft_s: float
    def __init__(self, request_id: _Optional[str] = ..., client_request_id: _Optional[str] = ..., path: _Optional[str] = ..., transport: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., age_s: _Optional[float] = ..., ttft_s: _Optional[float] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ("lost_only", "limit")
    LOST_ONLY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    lost_only: bool
    limit: int
    def __init__(self, lost_only: _Optional[bool] = ..., limit: _Optional[int] = ...) -> None: ...

class PathPrediction(_message.Message):
    __slots__ = ("path", "ttft_s", "tpot_s", "stress", "queued_tokens", "running", "prompt_share", "cached_tokens", "own_misses", "others_misses")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    STRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWN_MISSES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_MISSES_FIELD_NUMBER: _ClassVar[int]
    path: str
    ttft_s: float
    tpot_s: float
    stress: float
    queued_tokens: int
    running: int
    prompt_share: float
    cached_tokens: int
    own_misses: float
    others_misses: float
    def __init__(self, path: _Optional[str] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., stress: _Optional[float] = ..., queued_tokens: _Optional[int] = ..., running: _Optional[int] = ..., prompt_share: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., own_misses: _Optional[float] = ..., others_misses: _Optional[float] = ...) -> None: ...

class PathDecision(_message.Message):
    __slots__ = ("request_id", "path", "reason", "prompt_tokens", "output_tokens", "slo_ttft_s", "slo_tpot_s", "predictions", "measured", "ttft_s", "tpot_s", "stress", "lost_by", "objective_source", "solo_role")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    STRESS_FIELD_NUMBER: _ClassVar[int]
    LOST_BY_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOLO_ROLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    path: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    slo_ttft_s: float
    slo_tpot_s: float
    predictions: _containers.RepeatedCompositeFieldContainer[PathPrediction]
    measured: bool
    ttft_s: float
    tpot_s: float
    stress: float
    lost_by: float
    objective_source: str
    solo_role: str
    def __init__(self, request_id: _Optional[str] = ..., path: _Optional[str] = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., slo_ttft_s: _Optional[float] = ..., slo_tpot_s: _Optional[float] = ..., predictions: _Optional[_Iterable[_Union[PathPrediction, _Mapping]]] = ..., measured: _Optional[bool] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., stress: _Optional[float] = ..., lost_by: _Optional[float] = ..., objective_source: _Optional[str] = ..., solo_role: _Optional[str] = ...) -> None: ...

class PathCorrection(_message.Message):
    __slots__ = ("path", "ttft_factor", "tpot_factor", "measured")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TTFT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    TPOT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    path: str
    ttft_factor: float
    tpot_factor: float
    measured: int
    def __init__(self, path: _Optional[str] = ..., ttft_factor: _Optional[float] = ..., tpot_factor: _Optional[float] = ..., measured: _Optional[int] = ...) -> None: ...

class ListDecisionsResponse(_message.Message):
    __slots__ = ("decisions", "decided", "remembered", "lost", "corrections")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[PathDecision]
    decided: int
    remembered: int
    lost: int
    corrections: _containers.RepeatedCompositeFieldContainer[PathCorrection]
    def __init__(self, decisions: _Optional[_Iterable[_Union[PathDecision, _Mapping]]] = ..., decided: _Optional[int] = ..., remembered: _Optional[int] = ..., lost: _Optional[int] = ..., corrections: _Optional[_Iterable[_Union[PathCorrection, _Mapping]]] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest_json",)
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    manifest_json: str
    def __init__(self, manifest_json: _Optional[str] = ...) -> None: ...

class ResetPrefixCachesRequest(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pools: _Optional[_Iterable[str]] = ...) -> None: ...

class ResetPrefixCachesResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...
