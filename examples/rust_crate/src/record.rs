// Recorded routing: rings of tokens, files, and rows that are given back to other batches.
use crate::error::{c_text, checked, made_text, sized, Result};
use crate::{ffi, handle, Spec, TokenKey, View, ViewMut};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    DropOldest = 0,
    DropNewest = 1,
    Error = 2,
}

/// A ring of `capacity` tokens for each layer. Several threads may use it.
pub struct Recorder(handle::Recorder);

impl Recorder {
    /// Layers by their numbers in the model, with the spec of each. Capacity 0: 65536 tokens.
    pub fn new(layers: &[(i64, &Spec)], capacity: i64, when_full: WhenFull) -> Result<Recorder> {
        let numbers: Vec<i64> = layers.iter().map(|(number, _)| *number).collect();
        let specs: Vec<*const ffi::Spec> = layers
            .iter()
            .map(|(_, spec)| spec.0 .0 as *const ffi::Spec)
            .collect();
        let mut options: ffi::RecorderOptions = unsafe { sized() };
        options.capacity = capacity;
        options.when_full = when_full as i32;
        Ok(Recorder(handle::Recorder::make(|out| unsafe {
            ffi::conclave_recorder_create(
                numbers.as_ptr(),
                specs.as_ptr(),
                layers.len(),
                &options,
                out,
            )
        })?))
    }

    /// Adds T tokens of a layer: ids and weights [T, num_slots] as a forward has captured them, and
    /// a key for each. All or nothing.
    pub fn record(&self, layer: i64, ids: View, weights: View, tokens: &[TokenKey]) -> Result<()> {
        checked(unsafe {
            ffi::conclave_recorder_record(
                self.0 .0,
                layer,
                &ids.tensor,
                &weights.tensor,
                tokens.as_ptr(),
                tokens.len(),
            )
        })
    }

    /// The tokens that a layer was given, and those of them that are gone.
    pub fn counts(&self, layer: i64) -> Result<(i64, i64)> {
        let (mut recorded, mut dropped) = (0, 0);
        checked(unsafe {
            ffi::conclave_recorder_counts(self.0 .0, layer, &mut recorded, &mut dropped)
        })?;
        Ok((recorded, dropped))
    }

    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_text("path", path.as_ref().as_os_str().as_bytes())?;
        checked(unsafe { ffi::conclave_recorder_write(self.0 .0, path.as_ptr()) })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayLayer {
    pub layer: i64,
    pub num_slots: usize,
    pub num_tokens: i64,
    pub dropped_tokens: i64,
}

/// Recorded rows by token.
pub struct Replay(handle::Replay);

impl Replay {
    pub fn open(path: impl AsRef<Path>) -> Result<Replay> {
        let path = c_text("path", path.as_ref().as_os_str().as_bytes())?;
        let make = |out| unsafe { ffi::conclave_replay_open(path.as_ptr(), out) };
        Ok(Replay(handle::Replay::make(make)?))
    }

    /// Takes what the recorder has now.
    pub fn of(recorder: &Recorder) -> Result<Replay> {
        let make = |out| unsafe { ffi::conclave_replay_from_recorder(recorder.0 .0, out) };
        Ok(Replay(handle::Replay::make(make)?))
    }

    pub fn layers(&self) -> Result<Vec<ReplayLayer>> {
        let mut info: ffi::ReplayInfo = unsafe { sized() };
        checked(unsafe { ffi::conclave_replay_get_info(self.0 .0, &mut info) })?;
        let layer_at = |position| {
            let mut layer: ffi::ReplayLayer = unsafe { sized() };
            checked(unsafe { ffi::conclave_replay_get_layer(self.0 .0, position, &mut layer) })?;
            Ok(ReplayLayer {
                layer: layer.layer,
                num_slots: layer.num_slots as usize,
                num_tokens: layer.num_tokens,
                dropped_tokens: layer.dropped_tokens,
            })
        };
        (0..info.num_layers).map(layer_at).collect()
    }

    /// Writes the rows of these tokens to ids [T, num_slots] i32 and weights [T, num_slots] f32.
    pub fn find(
        &self,
        layer: i64,
        tokens: &[TokenKey],
        ids: ViewMut,
        weights: ViewMut,
    ) -> Result<()> {
        let keys = if tokens.is_empty() {
            ptr::null()
        } else {
            tokens.as_ptr()
        };
        checked(unsafe {
            ffi::conclave_replay_find(
                self.0 .0,
                layer,
                keys,
                tokens.len(),
                &ids.tensor,
                &weights.tensor,
            )
        })
    }

    /// A JSON object of how two differ; its member "equal" is true where all bits are the same.
    pub fn compare_json(&self, other: &Replay, most_examples: i64) -> Result<String> {
        made_text(|json| unsafe {
            ffi::conclave_replay_compare_json(self.0 .0, other.0 .0, most_examples, json)
        })
    }
}
