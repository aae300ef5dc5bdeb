// The part of conclave/c.h that this example uses, written by hand. Constants and layouts are those of
// src/capi/abi.txt, which never change.
#![allow(dead_code)]

use std::os::raw::{c_char, c_void};

pub type Status = i32;
pub const OK: Status = 0;
pub const ERROR_NULL_POINTER: Status = 101;
pub const ERROR_SHAPE: Status = 104;

pub const DTYPE_F32: i32 = 12;

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

// Up to the last member that is used here: the library takes what follows for zero.
#[repr(C)]
pub struct ForwardArgs {
    pub struct_size: usize,
    pub hidden: *const Tensor,
    pub out: *const Tensor,
}

extern "C" {
    pub fn conclave_version() -> *const c_char;
    pub fn conclave_last_error(error: *mut Error) -> Status;
    pub fn conclave_status_name(status: Status) -> *const c_char;
    pub fn conclave_text_free(text: *mut c_char);

    pub fn conclave_context_create(options: *const c_void, context: *mut *mut Context) -> Status;
    pub fn conclave_context_destroy(context: *mut Context);

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
    pub fn conclave_spec_get_info(spec: *const Spec, info: *mut SpecInfo) -> Status;
    pub fn conclave_spec_destroy(spec: *mut Spec);
}
