//! A thin safe face of the C interface (`conclave/c.h`), from the standard library alone: objects
//! that end themselves, errors as values, and lifetimes that hold arrays as long as the library
//! reads them. No pointer and no status leaves this crate.

mod adapter;
mod convert;
mod error;
mod ffi;
mod handle;
mod layer;
mod model;
mod ranks;
mod record;
mod refit;
mod tensor;
mod transport;

pub use adapter::{Factors, LoraCheckpoint, Matrix, Mlp};
pub use convert::{convert_formats_json, convert_model, Conversion, ConvertOptions, Progress};
pub use error::{Error, Result};
pub use ffi::TokenKey;
pub use layer::{Call, InPlace, Layer, LayerOptions, Packed, Stats, Workspace};
pub use model::{Checkpoint, Context, Source, Spec, SpecInfo};
pub use ranks::{
    local_group, transports_json, Alone, Communicator, Connect, Exchange, OnRanks, Reduced,
};
pub use record::{Recorder, Replay, ReplayLayer, WhenFull};
pub use refit::{BroadcastRefit, Refit, RefitMode, RefitOptions};
pub use tensor::{Bf16, Element, View, ViewMut, F16};

/// Transports of one's own.
pub mod own {
    pub use crate::transport::{
        Element, Failure, Fault, Kind, Operation, Outcome, Reduce, Transport,
    };
}

/// The version of the library that runs: "0.2.0".
pub fn version() -> String {
    unsafe { error::text(ffi::conclave_version()) }
}
