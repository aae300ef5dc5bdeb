// New weights while a layer serves. A refit that is dropped without a commit leaves the old ones.
use crate::error::{c_text, checked, sized, Result};
use crate::{ffi, handle, Checkpoint, InPlace, Layer, Packed, Source};
use std::marker::PhantomData;
use std::os::raw::c_char;
use std::ptr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefitMode {
    Staged = 0,
    StagedCopy = 1,
    InPlace = 2,
}

/// Without names the scope is all of the layer; epoch 0 is one more than the last.
#[derive(Clone, Copy, Debug)]
pub struct RefitOptions<'a> {
    pub experts: &'a [i32],
    pub tensors: &'a [&'a str],
    pub epoch: u64,
    pub mode: RefitMode,
}

impl Default for RefitOptions<'_> {
    fn default() -> Self {
        RefitOptions {
            experts: &[],
            tensors: &[],
            epoch: 0,
            mode: RefitMode::Staged,
        }
    }
}

/// A transaction. It goes from thread to thread, one at a time, and the layer may end before it.
pub struct Refit<W = Packed> {
    handle: handle::Refit,
    weights: PhantomData<W>,
}

// Says that arrays which it has staged outlive it.
impl<W> Drop for Refit<W> {
    fn drop(&mut self) {}
}

impl<W> Layer<W> {
    pub fn refit(&self, options: &RefitOptions) -> Result<Refit<W>> {
        let names = options
            .tensors
            .iter()
            .map(|name| c_text("tensors", *name))
            .collect::<Result<Vec<_>>>()?;
        let tensors: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut scope: ffi::RefitScope = unsafe { sized() };
        scope.experts = options.experts.as_ptr();
        scope.experts_count = options.experts.len();
        scope.tensors = tensors.as_ptr();
        scope.tensors_count = tensors.len();
        let mut given: ffi::RefitOptions = unsafe { sized() };
        given.scope = &scope;
        given.epoch = options.epoch;
        given.mode = options.mode as i32;
        let make = |out| unsafe { ffi::conclave_refit_create(self.handle.0, &given, out) };
        Ok(Refit {
            handle: handle::Refit::make(make)?,
            weights: PhantomData,
        })
    }
}

impl Refit<Packed> {
    /// Reads and packs what the scope names; the arrays are free again when it returns.
    pub fn stage(&mut self, source: &Source) -> Result<()> {
        stage(&self.handle, source)
    }

    pub fn stage_from(&mut self, checkpoint: &Checkpoint, index: i64) -> Result<()> {
        checked(unsafe {
            ffi::conclave_refit_stage_from_checkpoint(
                self.handle.0,
                checkpoint.0 .0,
                index,
                ptr::null(),
            )
        })
    }
}

impl<'w> Refit<InPlace<'w>> {
    /// The layer reads these arrays from the commit on: they live as long as it does.
    pub fn stage(&mut self, source: &Source<'w>) -> Result<()> {
        stage(&self.handle, source)
    }
}

fn stage(handle: &handle::Refit, source: &Source) -> Result<()> {
    checked(unsafe { ffi::conclave_refit_stage(handle.0, source.handle.0, ptr::null()) })
}

impl<W> Refit<W> {
    pub fn is_staged(&self) -> Result<bool> {
        let mut staged = 0;
        checked(unsafe { ffi::conclave_refit_is_staged(self.handle.0, &mut staged) })?;
        Ok(staged == 1)
    }

    /// After an error the transaction goes on: what failed may be staged again.
    pub fn commit(&mut self) -> Result<()> {
        checked(unsafe { ffi::conclave_refit_commit(self.handle.0) })
    }

    pub fn rollback(self) -> Result<()> {
        checked(unsafe { ffi::conclave_refit_rollback(self.handle.0) })
    }
}
