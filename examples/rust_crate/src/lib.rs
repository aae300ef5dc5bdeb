//! A thin safe face of the C interface (`conclave/c.h`), from the standard library alone: objects
//! that end themselves, errors as values, and lifetimes that hold arrays as long as the library
//! reads them. No pointer and no status leaves this crate.

mod adapter;
mod error;
mod ffi;
mod handle;
mod layer;
mod model;
mod record;
mod refit;
mod tensor;

pub use adapter::{Factors, LoraCheckpoint, Matrix, Mlp};
pub use error::{Error, Result};
pub use ffi::TokenKey;
pub use layer::{Call, InPlace, Layer, LayerOptions, Packed, Stats, Workspace};
pub use model::{Checkpoint, Context, Source, Spec, SpecInfo};
pub use record::{Recorder, Replay, ReplayLayer, WhenFull};
pub use refit::{Refit, RefitMode, RefitOptions};
pub use tensor::{Bf16, Element, View, ViewMut, F16};

/// The version of the library that runs: "0.2.0".
pub fn version() -> String {
    unsafe { error::text(ffi::conclave_version()) }
}
