// The part of conclave/c.h that this crate and examples/rust use, written by hand. Names, layouts and
// constants are those of src/capi/abi.txt, which never change; tests/capi/rust_abi_test.py compares
// the two.
#![allow(dead_code)]

use std::os::raw::{c_char, c_void};

pub type Status = i32;

pub const OK: Status = 0;
pub const ERROR_INVALID_ARGUMENT: Status = 100;
pub const ERROR_NULL_POINTER: Status = 101;
pub const ERROR_SHAPE: Status = 104;
pub const ERROR_STATE: Status = 112;
pub const ERROR_CANCELLED: Status = 116;
pub const ERROR_INTERNAL: Status = 199;
pub const ERROR_COMM_PEER_LOST: Status = 700;
pub const ERROR_COMM_TIMEOUT: Status = 701;
pub const ERROR_COMM_MISMATCH: Status = 702;
pub const ERROR_COMM_ABORTED: Status = 703;

pub const DTYPE_I32: i32 = 7;
pub const DTYPE_I64: i32 = 9;
pub const DTYPE_F16: i32 = 10;
pub const DTYPE_BF16: i32 = 11;
pub const DTYPE_F32: i32 = 12;
pub const DTYPE_F64: i32 = 13;
pub const MAX_RANK: usize = 8;
pub const WEIGHT_USE_IN_PLACE: i32 = 1;
pub const WEIGHT_MATRIX_DOWN: i32 = 2;
pub const CONNECT_HAS_GROUP: u32 = 1;
pub const COMM_KIND_ALL_TO_ALL_V: i32 = 0;
pub const COMM_KIND_ALL_GATHER: i32 = 1;
pub const COMM_KIND_ALL_REDUCE: i32 = 2;
pub const COMM_KIND_REDUCE_SCATTER: i32 = 3;
pub const COMM_KIND_BARRIER: i32 = 4;
pub const COMM_KIND_SEND: i32 = 5;
pub const COMM_KIND_RECV: i32 = 6;
pub const REDUCE_OP_MAX: i32 = 1;

// Handles are pointers to types that nobody here can make.
macro_rules! handles {
    ($($name:ident),*) => { $(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )* };
}
handles!(
    Context,
    Checkpoint,
    Spec,
    Source,
    Layer,
    Workspace,
    LoraCheckpoint,
    Refit,
    Recorder,
    Replay,
    Router,
    Communicator,
    Conversion
);

#[repr(C)]
pub struct Error {
    pub struct_size: usize,
    pub status: Status,
    pub peer: i32,
    pub message: *const c_char,
    pub what: *const c_char,
    pub file: *const c_char,
    pub tensor: *const c_char,
    pub expected: *const c_char,
    pub found: *const c_char,
    pub limit: *const c_char,
    pub hint: *const c_char,
    pub phase: *const c_char,
}

#[repr(C)]
pub struct ContextOptions {
    pub struct_size: usize,
    pub device: *const c_char,
    pub isa: *const c_char,
    pub num_threads: i32,
    pub flags: u32,
    pub executor: *const c_void,
    pub host_allocator: *const c_void,
    pub device_allocator: *const c_void,
    pub log: *const c_void,
    pub communicator: *mut Communicator,
    pub tensor_communicator: *mut Communicator,
}

#[repr(C)]
pub struct ConnectOptions {
    pub struct_size: usize,
    pub rank: i32,
    pub size: i32,
    pub meeting_point: *const c_char,
    pub bootstrap: *mut Communicator,
    pub exchange: Option<
        extern "C" fn(
            user: *mut c_void,
            mine: *const c_char,
            num_ranks: i32,
            all: *mut *const c_char,
        ) -> Status,
    >,
    pub exchange_user: *mut c_void,
    pub group: i32,
    pub flags: u32,
    pub device: *const c_char,
    pub timeout_ms: i64,
}

#[repr(C)]
pub struct CommunicatorInfo {
    pub struct_size: usize,
    pub rank: i32,
    pub size: i32,
    pub timeout_ms: i64,
    pub transport: *const c_char,
}

#[repr(C)]
pub struct CommOperation {
    pub struct_size: usize,
    pub number: u64,
    pub kind: i32,
    pub peer: i32,
    pub send: *const c_void,
    pub send_bytes: usize,
    pub recv: *mut c_void,
    pub recv_bytes: usize,
    pub send_counts: *const i64,
    pub send_offsets: *const i64,
    pub recv_counts: *const i64,
    pub recv_offsets: *const i64,
    pub dtype: i32,
    pub reduce: i32,
}

#[repr(C)]
pub struct CommFailure {
    pub struct_size: usize,
    pub peer: i32,
    pub reserved: i32,
    pub reason: *const c_char,
}

#[repr(C)]
pub struct OwnCommunicator {
    pub struct_size: usize,
    pub name: *const c_char,
    pub user: *mut c_void,
    pub rank: i32,
    pub size: i32,
    pub timeout_ms: i64,
    pub flags: u32,
    pub reserved: u32,
    pub start: Option<
        extern "C" fn(
            user: *mut c_void,
            operation: *const CommOperation,
            failure: *mut CommFailure,
        ) -> Status,
    >,
    pub wait: Option<
        extern "C" fn(
            user: *mut c_void,
            number: u64,
            deadline_ns: i64,
            phase: *const c_char,
            failure: *mut CommFailure,
        ) -> Status,
    >,
    pub test: Option<
        extern "C" fn(
            user: *mut c_void,
            number: u64,
            complete: *mut i32,
            phase: *const c_char,
            failure: *mut CommFailure,
        ) -> Status,
    >,
    pub abort: Option<extern "C" fn(user: *mut c_void, reason: *const c_char)>,
    pub release: Option<extern "C" fn(user: *mut c_void)>,
}

#[repr(C)]
pub struct Parallel {
    pub struct_size: usize,
    pub ep_size: i32,
    pub ep_rank: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub struct_size: usize,
    pub data: *mut c_void,
    pub dtype: i32,
    pub rank: i32,
    pub shape: [i64; MAX_RANK],
    pub row_stride: i64,
}

#[repr(C)]
pub struct NamedTensor {
    pub name: *const c_char,
    pub tensor: *const Tensor,
}

#[repr(C)]
pub struct SourceOptions {
    pub struct_size: usize,
    pub order: i32,
    pub shared_order: i32,
    pub residual_order: i32,
    pub memory: i32,
    pub num_experts: i64,
    pub experts: *const i32,
    pub experts_count: usize,
}

#[repr(C)]
pub struct CheckpointInfo {
    pub struct_size: usize,
    pub num_layers: usize,
    pub num_hidden_layers: i64,
    pub bytes: u64,
    pub parameters: u64,
    pub model_type: *const c_char,
}

#[repr(C)]
pub struct LayerInfo {
    pub struct_size: usize,
    pub index: i64,
}

#[repr(C)]
pub struct SpecInfo {
    pub struct_size: usize,
    pub num_experts: i64,
    pub top_k: i64,
    pub hidden_size: i64,
    pub intermediate_size: i64,
    pub num_logits: i64,
    pub num_slots: i64,
}

#[repr(C)]
pub struct LayerOptions {
    pub struct_size: usize,
    pub max_tokens: i64,
    pub kernel: *const c_char,
    pub arithmetic: *const c_char,
    pub tuning: *const c_char,
    pub id_policy: i32,
    pub transport: i32,
    pub ep_combine: i32,
    pub chunk_order: i32,
    pub determinism: i32,
    pub weights: i32,
    pub spare_experts: i32,
    pub reserved: i32,
    pub max_adapter_rank: i64,
}

#[repr(C)]
pub struct LayerStats {
    pub struct_size: usize,
    pub forwards: i64,
    pub tokens: i64,
    pub skipped_ids: i64,
    pub tokens_without_finite_logit: i64,
    pub max_tokens: i64,
    pub num_local_experts: i64,
    pub workspace_bytes: usize,
    pub packed_bytes: usize,
    pub in_place_bytes: usize,
    pub placement_epoch: u64,
    pub num_adapters: i64,
    pub adapter_bytes: usize,
    pub refit_epoch: u64,
    pub gate_rows_with_nan: i64,
}

#[repr(C)]
pub struct ForwardArgs {
    pub struct_size: usize,
    pub hidden: *const Tensor,
    pub out: *const Tensor,
    pub router_logits: *const Tensor,
    pub topk_ids: *const Tensor,
    pub topk_weights: *const Tensor,
    pub router_input: *const Tensor,
    pub residual_input: *const Tensor,
    pub token_ids: *const Tensor,
    pub padding_mask: *const Tensor,
    pub shared_out: *const Tensor,
    pub captured_logits: *const Tensor,
    pub captured_ids: *const Tensor,
    pub captured_weights: *const Tensor,
    pub num_tokens: *const i64,
    pub expert_load: *mut i64,
    pub expert_load_count: usize,
    pub workspace: *mut Workspace,
    pub stream: *mut c_void,
    pub timings: *mut c_void,
    pub top_k: i64,
    pub banned_experts: *const Tensor,
    pub expert_budget: i64,
    pub adapter_ids: *const Tensor,
    pub adapter: *const i32,
}

#[repr(C)]
pub struct LoraFactors {
    pub struct_size: usize,
    pub mlp: i32,
    pub matrix: i32,
    pub expert: i64,
    pub a: *const Tensor,
    pub b: *const Tensor,
    pub scale: f64,
    pub name: *const c_char,
}

#[repr(C)]
pub struct LoraAdapter {
    pub struct_size: usize,
    pub name: *const c_char,
    pub factors: *const LoraFactors,
    pub num_factors: usize,
}

#[repr(C)]
pub struct LoraCheckpointInfo {
    pub struct_size: usize,
    pub layers: *const i64,
    pub num_layers: usize,
    pub max_rank: i64,
    pub num_others: usize,
}

#[repr(C)]
pub struct RefitScope {
    pub struct_size: usize,
    pub experts: *const i32,
    pub experts_count: usize,
    pub tensors: *const *const c_char,
    pub tensors_count: usize,
}

#[repr(C)]
pub struct RefitOptions {
    pub struct_size: usize,
    pub scope: *const RefitScope,
    pub epoch: u64,
    pub mode: i32,
    pub flags: u32,
    pub num_threads: i32,
    pub reserved: i32,
    pub executor: *const c_void,
    pub communicator: *mut Communicator,
}

#[repr(C)]
pub struct BroadcastOptions {
    pub struct_size: usize,
    pub root: i32,
    pub memory: i32,
    pub part: *const RefitScope,
    pub exchange_bytes: i64,
}

#[repr(C)]
pub struct RouteArgs {
    pub struct_size: usize,
    pub logits: *const Tensor,
    pub topk_ids: *const Tensor,
    pub topk_weights: *const Tensor,
}

#[repr(C)]
pub struct RouteCall {
    pub struct_size: usize,
    pub num_tokens: i64,
    pub top_k: i64,
    pub num_experts: i64,
    pub num_zero_experts: i64,
    pub num_logits: i64,
    pub num_shared: i64,
    pub first_token: i64,
    pub logits: *const f32,
    pub token_ids: *const i32,
    pub given_ids: *const i32,
    pub selection_bias: *const f32,
    pub expert_scale: *const f32,
    pub global_scale: *const f32,
    pub banned: *const u8,
    pub banned_stride: i64,
    pub scratch: *mut c_void,
    pub topk_ids: *mut i32,
    pub topk_weights: *mut f32,
}

#[repr(C)]
pub struct OwnRouter {
    pub struct_size: usize,
    pub name: *const c_char,
    pub user: *mut c_void,
    pub route: Option<extern "C" fn(user: *mut c_void, call: *mut RouteCall) -> Status>,
    pub release: Option<extern "C" fn(user: *mut c_void)>,
}

#[repr(C)]
pub struct KeepRule {
    pub struct_size: usize,
    pub pattern: *const c_char,
    pub format: *const c_char,
}

#[repr(C)]
pub struct ConvertProgress {
    pub struct_size: usize,
    pub phase: *const c_char,
    pub done: i64,
    pub total: i64,
    pub reason: *const c_char,
}

#[repr(C)]
pub struct ConvertOptions {
    pub struct_size: usize,
    pub container: i32,
    pub existing: i32,
    pub scales: i32,
    pub flags: u32,
    pub layers: *const i64,
    pub layers_count: usize,
    pub keep: *const KeepRule,
    pub keep_count: usize,
    pub shard_bytes: u64,
    pub tokens: i64,
    pub seed: u64,
    pub progress:
        Option<extern "C" fn(user: *mut c_void, progress: *mut ConvertProgress) -> Status>,
    pub progress_user: *mut c_void,
}

#[repr(C)]
pub struct ConversionInfo {
    pub struct_size: usize,
    pub model: *const c_char,
    pub model_type: *const c_char,
    pub incomplete: *const c_char,
    pub no_tokenizer: *const c_char,
    pub bytes_before: u64,
    pub bytes_after: u64,
    pub shards: usize,
    pub shards_kept: usize,
    pub num_matrices: usize,
    pub num_layers: usize,
    pub relative_error: f64,
    pub worst_error: f64,
}

#[repr(C)]
pub struct RecorderOptions {
    pub struct_size: usize,
    pub capacity: i64,
    pub when_full: i32,
    pub reserved: i32,
    pub model: *const c_char,
    pub model_type: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenKey {
    pub sequence: i64,
    pub position: i64,
}

#[repr(C)]
pub struct ReplayInfo {
    pub struct_size: usize,
    pub num_layers: usize,
}

#[repr(C)]
pub struct ReplayLayer {
    pub struct_size: usize,
    pub layer: i64,
    pub num_slots: i64,
    pub num_ids: i64,
    pub num_tokens: i64,
    pub dropped_tokens: i64,
    pub spec_hash: u64,
}

extern "C" {
    pub fn conclave_version() -> *const c_char;
    pub fn conclave_last_error(error: *mut Error) -> Status;
    pub fn conclave_status_name(status: Status) -> *const c_char;
    pub fn conclave_text_free(text: *mut c_char);

    pub fn conclave_context_create(
        options: *const ContextOptions,
        context: *mut *mut Context,
    ) -> Status;
    pub fn conclave_context_destroy(context: *mut Context);
    pub fn conclave_context_add_router(context: *mut Context, router: *const OwnRouter) -> Status;

    pub fn conclave_local_group(
        num_ranks: i32,
        timeout_ms: i64,
        out: *mut *mut Communicator,
    ) -> Status;
    pub fn conclave_connect(
        transport: *const c_char,
        options: *const ConnectOptions,
        out: *mut *mut Communicator,
    ) -> Status;
    pub fn conclave_communicator_from_own(
        own: *const OwnCommunicator,
        out: *mut *mut Communicator,
    ) -> Status;
    pub fn conclave_communicator_destroy(communicator: *mut Communicator);
    pub fn conclave_communicator_get_info(
        communicator: *const Communicator,
        info: *mut CommunicatorInfo,
    ) -> Status;
    pub fn conclave_communicator_barrier(
        communicator: *mut Communicator,
        phase: *const c_char,
    ) -> Status;
    pub fn conclave_communicator_all_gather(
        communicator: *mut Communicator,
        send: *const c_void,
        recv: *mut c_void,
        bytes: usize,
        phase: *const c_char,
    ) -> Status;
    pub fn conclave_communicator_all_reduce(
        communicator: *mut Communicator,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: i32,
        phase: *const c_char,
    ) -> Status;
    pub fn conclave_communicator_abort(
        communicator: *mut Communicator,
        reason: *const c_char,
    ) -> Status;
    pub fn conclave_survivors(
        failed: *mut Communicator,
        timeout_ms: i64,
        out: *mut *mut Communicator,
        old_ranks: *mut i32,
    ) -> Status;
    pub fn conclave_transports_json(json: *mut *mut c_char) -> Status;

    pub fn conclave_convert_model(
        context: *const Context,
        source: *const c_char,
        destination: *const c_char,
        format: *const c_char,
        options: *const ConvertOptions,
        out: *mut *mut Conversion,
    ) -> Status;
    pub fn conclave_conversion_destroy(conversion: *mut Conversion);
    pub fn conclave_conversion_get_info(
        conversion: *const Conversion,
        info: *mut ConversionInfo,
    ) -> Status;
    pub fn conclave_conversion_json(
        conversion: *const Conversion,
        json: *mut *mut c_char,
    ) -> Status;
    pub fn conclave_convert_formats_json(json: *mut *mut c_char) -> Status;

    pub fn conclave_checkpoint_open(
        path: *const c_char,
        options: *const c_void,
        out: *mut *mut Checkpoint,
    ) -> Status;
    pub fn conclave_checkpoint_destroy(checkpoint: *mut Checkpoint);
    pub fn conclave_checkpoint_get_info(
        checkpoint: *const Checkpoint,
        info: *mut CheckpointInfo,
    ) -> Status;
    pub fn conclave_checkpoint_get_layer(
        checkpoint: *const Checkpoint,
        position: usize,
        info: *mut LayerInfo,
    ) -> Status;

    pub fn conclave_spec_from_json(json: *const c_char, out: *mut *mut Spec) -> Status;
    pub fn conclave_spec_to_json(spec: *const Spec, json: *mut *mut c_char) -> Status;
    pub fn conclave_spec_get_info(spec: *const Spec, info: *mut SpecInfo) -> Status;
    pub fn conclave_spec_destroy(spec: *mut Spec);

    pub fn conclave_source_from_tensors(
        tensors: *const NamedTensor,
        count: usize,
        options: *const SourceOptions,
        out: *mut *mut Source,
    ) -> Status;
    pub fn conclave_source_destroy(source: *mut Source);

    pub fn conclave_layer_create(
        context: *const Context,
        spec: *const Spec,
        source: *const Source,
        options: *const LayerOptions,
        parallel: *const Parallel,
        out: *mut *mut Layer,
    ) -> Status;
    pub fn conclave_layer_create_from_checkpoint(
        context: *const Context,
        checkpoint: *const Checkpoint,
        index: i64,
        options: *const LayerOptions,
        parallel: *const Parallel,
        out: *mut *mut Layer,
    ) -> Status;
    pub fn conclave_layer_destroy(layer: *mut Layer);
    pub fn conclave_layer_spec(layer: *const Layer, out: *mut *mut Spec) -> Status;
    pub fn conclave_layer_forward(layer: *const Layer, args: *const ForwardArgs) -> Status;
    pub fn conclave_layer_get_stats(layer: *const Layer, stats: *mut LayerStats) -> Status;
    pub fn conclave_layer_explain(layer: *const Layer, text: *mut *mut c_char) -> Status;
    pub fn conclave_layer_content_hash(layer: *const Layer, content_hash: *mut u64) -> Status;
    pub fn conclave_layer_workspace_bytes(
        layer: *const Layer,
        tokens: i64,
        bytes: *mut usize,
    ) -> Status;
    pub fn conclave_workspace_create(
        context: *const Context,
        bytes: usize,
        stream: *mut c_void,
        out: *mut *mut Workspace,
    ) -> Status;
    pub fn conclave_workspace_destroy(workspace: *mut Workspace);

    pub fn conclave_layer_add_adapter(
        layer: *mut Layer,
        adapter: *const LoraAdapter,
        id: *mut i32,
    ) -> Status;
    pub fn conclave_layer_add_adapter_from_checkpoint(
        layer: *mut Layer,
        checkpoint: *const LoraCheckpoint,
        index: i64,
        model: *const Checkpoint,
        order: i32,
        id: *mut i32,
    ) -> Status;
    pub fn conclave_layer_remove_adapter(layer: *mut Layer, id: i32) -> Status;
    pub fn conclave_layer_adapters_json(layer: *const Layer, json: *mut *mut c_char) -> Status;
    pub fn conclave_lora_checkpoint_open(
        directory: *const c_char,
        out: *mut *mut LoraCheckpoint,
    ) -> Status;
    pub fn conclave_lora_checkpoint_destroy(checkpoint: *mut LoraCheckpoint);
    pub fn conclave_lora_checkpoint_get_info(
        checkpoint: *const LoraCheckpoint,
        info: *mut LoraCheckpointInfo,
    ) -> Status;

    pub fn conclave_refit_create(
        layer: *mut Layer,
        options: *const RefitOptions,
        out: *mut *mut Refit,
    ) -> Status;
    pub fn conclave_refit_destroy(refit: *mut Refit);
    pub fn conclave_refit_stage(
        refit: *mut Refit,
        source: *const Source,
        part: *const RefitScope,
    ) -> Status;
    pub fn conclave_refit_stage_from_checkpoint(
        refit: *mut Refit,
        checkpoint: *const Checkpoint,
        index: i64,
        part: *const RefitScope,
    ) -> Status;
    pub fn conclave_refit_is_staged(refit: *const Refit, staged: *mut i32) -> Status;
    pub fn conclave_refit_commit(refit: *mut Refit) -> Status;
    pub fn conclave_refit_rollback(refit: *mut Refit) -> Status;
    pub fn conclave_refit_stage_broadcast(
        refit: *mut Refit,
        communicator: *mut Communicator,
        source: *const Source,
        options: *const BroadcastOptions,
    ) -> Status;
    pub fn conclave_refit_refuse_broadcast(
        refit: *mut Refit,
        communicator: *mut Communicator,
        reason: *const c_char,
    ) -> Status;
    pub fn conclave_refit_withdraw_because(refit: *mut Refit, reason: *const c_char) -> Status;
    pub fn conclave_layer_withdraw_refit_because(
        layer: *const Layer,
        communicator: *mut Communicator,
        reason: *const c_char,
    ) -> Status;
    pub fn conclave_router_create(
        context: *const Context,
        spec: *const Spec,
        out: *mut *mut Router,
    ) -> Status;
    pub fn conclave_router_destroy(router: *mut Router);
    pub fn conclave_router_route(router: *const Router, args: *const RouteArgs) -> Status;

    pub fn conclave_recorder_create(
        layers: *const i64,
        specs: *const *const Spec,
        num_layers: usize,
        options: *const RecorderOptions,
        out: *mut *mut Recorder,
    ) -> Status;
    pub fn conclave_recorder_destroy(recorder: *mut Recorder);
    pub fn conclave_recorder_record(
        recorder: *mut Recorder,
        layer: i64,
        topk_ids: *const Tensor,
        topk_weights: *const Tensor,
        tokens: *const TokenKey,
        num_tokens: usize,
    ) -> Status;
    pub fn conclave_recorder_counts(
        recorder: *const Recorder,
        layer: i64,
        recorded: *mut i64,
        dropped: *mut i64,
    ) -> Status;
    pub fn conclave_recorder_write(recorder: *const Recorder, path: *const c_char) -> Status;
    pub fn conclave_replay_open(path: *const c_char, out: *mut *mut Replay) -> Status;
    pub fn conclave_replay_from_recorder(
        recorder: *const Recorder,
        out: *mut *mut Replay,
    ) -> Status;
    pub fn conclave_replay_destroy(replay: *mut Replay);
    pub fn conclave_replay_get_info(replay: *const Replay, info: *mut ReplayInfo) -> Status;
    pub fn conclave_replay_get_layer(
        replay: *const Replay,
        position: usize,
        info: *mut ReplayLayer,
    ) -> Status;
    pub fn conclave_replay_find(
        replay: *const Replay,
        layer: i64,
        tokens: *const TokenKey,
        num_tokens: usize,
        topk_ids: *const Tensor,
        topk_weights: *const Tensor,
    ) -> Status;
    pub fn conclave_replay_compare_json(
        first: *const Replay,
        second: *const Replay,
        most_examples: i64,
        json: *mut *mut c_char,
    ) -> Status;
}
