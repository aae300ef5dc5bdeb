// The part of conclave/c.h that this example uses, written by hand. Constants and layouts are those of
// src/capi/abi.txt, which never change.
#![allow(dead_code)]

use std::os::raw::{c_char, c_void};

pub type Status = i32;
pub const OK: Status = 0;
pub const ERROR_NULL_POINTER: Status = 101;
pub const ERROR_SHAPE: Status = 104;
pub const ERROR_INTERNAL: Status = 199;

pub const DTYPE_I32: i32 = 7;
pub const DTYPE_F32: i32 = 12;
pub const WEIGHT_MATRIX_DOWN: i32 = 2;

// Handles are pointers to types that nobody here can make.
#[repr(C)]
pub struct Context {
    _private: [u8; 0],
}
#[repr(C)]
pub struct Checkpoint {
    _private: [u8; 0],
}
#[repr(C)]
pub struct Spec {
    _private: [u8; 0],
}
#[repr(C)]
pub struct Layer {
    _private: [u8; 0],
}
#[repr(C)]
pub struct Router {
    _private: [u8; 0],
}

#[repr(C)]
pub struct Error {
    pub struct_size: usize,
    pub status: Status,
    pub peer: i32,
    pub message: *const c_char,
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
    pub choices: [i32; 8],
    pub max_adapter_rank: i64,
}

#[repr(C)]
pub struct LayerStats {
    pub struct_size: usize,
    pub forwards: i64,
    pub tokens: i64,
}

#[repr(C)]
pub struct Tensor {
    pub struct_size: usize,
    pub data: *mut c_void,
    pub dtype: i32,
    pub rank: i32,
    pub shape: [i64; 8],
    pub row_stride: i64,
}

#[repr(C)]
pub struct ForwardArgs {
    pub struct_size: usize,
    pub hidden: *const Tensor,
    pub out: *const Tensor,
    pub inputs_and_captures: [*const Tensor; 11],
    pub num_tokens: *const i64,
    pub expert_load: *mut i64,
    pub expert_load_count: usize,
    pub workspace: *mut c_void,
    pub stream: *mut c_void,
    pub timings: *mut c_void,
    pub top_k: i64,
    pub banned_experts: *const Tensor,
    pub expert_budget: i64,
    pub adapter_ids: *const Tensor,
    pub adapter: *const i32,
}

// Up to the last member that is used here: the library takes what follows for zero.
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
    pub shared_weights: *mut f32,
    pub tokens_without_finite_logit: i64,
    pub reason: *const c_char,
}

#[repr(C)]
pub struct OwnRouter {
    pub struct_size: usize,
    pub name: *const c_char,
    pub user: *mut c_void,
    pub route: Option<extern "C" fn(*mut c_void, *mut RouteCall) -> Status>,
    pub release: Option<extern "C" fn(*mut c_void)>,
    pub scratch_bytes: usize,
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

extern "C" {
    pub fn conclave_version() -> *const c_char;
    pub fn conclave_last_error(error: *mut Error) -> Status;
    pub fn conclave_status_name(status: Status) -> *const c_char;
    pub fn conclave_text_free(text: *mut c_char);

    pub fn conclave_context_create(options: *const c_void, context: *mut *mut Context) -> Status;
    pub fn conclave_context_destroy(context: *mut Context);
    pub fn conclave_context_add_router(context: *mut Context, router: *const OwnRouter) -> Status;

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

    pub fn conclave_layer_create_from_checkpoint(
        context: *const Context,
        checkpoint: *const Checkpoint,
        index: i64,
        options: *const LayerOptions,
        parallel: *const c_void,
        out: *mut *mut Layer,
    ) -> Status;
    pub fn conclave_layer_destroy(layer: *mut Layer);
    pub fn conclave_layer_spec(layer: *const Layer, out: *mut *mut Spec) -> Status;
    pub fn conclave_layer_forward(layer: *const Layer, args: *const ForwardArgs) -> Status;
    pub fn conclave_layer_get_stats(layer: *const Layer, stats: *mut LayerStats) -> Status;
    pub fn conclave_layer_explain(layer: *const Layer, text: *mut *mut c_char) -> Status;
    pub fn conclave_layer_add_adapter(
        layer: *mut Layer,
        adapter: *const LoraAdapter,
        id: *mut i32,
    ) -> Status;
    pub fn conclave_layer_remove_adapter(layer: *mut Layer, id: i32) -> Status;
    pub fn conclave_router_create(
        context: *const Context,
        spec: *const Spec,
        out: *mut *mut Router,
    ) -> Status;
    pub fn conclave_router_destroy(router: *mut Router);
    pub fn conclave_router_route(router: *const Router, args: *const RouteArgs) -> Status;
    pub fn conclave_spec_from_json(json: *const c_char, out: *mut *mut Spec) -> Status;
    pub fn conclave_spec_get_info(spec: *const Spec, info: *mut SpecInfo) -> Status;
    pub fn conclave_spec_destroy(spec: *mut Spec);
}
