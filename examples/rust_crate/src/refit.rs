// New weights while a layer serves. A refit that is dropped without a commit leaves the old ones.
use crate::error::{c_text, checked, sized, Result};
use crate::ranks::number;
use crate::{ffi, handle, Alone, Checkpoint, Communicator, InPlace, Layer, Packed, Source};
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
pub struct Refit<W = Packed, R = Alone> {
    handle: handle::Refit,
    kind: PhantomData<(W, R)>,
}

// Says that arrays which it has staged outlive it.
impl<W, R> Drop for Refit<W, R> {
    fn drop(&mut self) {}
}

/// A transaction whose weights come from one rank of a communicator, which nobody else uses until it
/// ends: all of these ranks have the new weights, or none.
pub struct BroadcastRefit<'c, R = Alone> {
    refit: Refit<Packed, R>,
    communicator: &'c mut Communicator,
}

// Says that the communicator outlives it.
impl<R> Drop for BroadcastRefit<'_, R> {
    fn drop(&mut self) {}
}

impl<W, R> Layer<W, R> {
    pub fn refit(&self, options: &RefitOptions) -> Result<Refit<W, R>> {
        self.begin(options, ptr::null_mut())
    }

    /// Tells the other ranks why this one has no transaction where they have one. `communicator` is
    /// that of their broadcast, if there is one.
    pub fn withdraw_refit(
        &self,
        communicator: Option<&mut Communicator>,
        reason: &str,
    ) -> Result<()> {
        let reason = c_text("reason", reason)?;
        let over = communicator.map_or(ptr::null_mut(), |over| over.0 .0);
        checked(unsafe {
            ffi::conclave_layer_withdraw_refit_because(self.handle.0, over, reason.as_ptr())
        })
    }

    fn begin(
        &self,
        options: &RefitOptions,
        communicator: *mut ffi::Communicator,
    ) -> Result<Refit<W, R>> {
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
        given.communicator = communicator;
        let make = |out| unsafe { ffi::conclave_refit_create(self.handle.0, &given, out) };
        Ok(Refit {
            handle: handle::Refit::make(make)?,
            kind: PhantomData,
        })
    }
}

impl<R> Layer<Packed, R> {
    /// Whoever is refused tells the other ranks, and waits for their commit to do so.
    pub fn refit_over<'c>(
        &self,
        options: &RefitOptions,
        communicator: &'c mut Communicator,
    ) -> Result<BroadcastRefit<'c, R>> {
        Ok(BroadcastRefit {
            refit: self.begin(options, communicator.0 .0)?,
            communicator,
        })
    }
}

impl<R> BroadcastRefit<'_, R> {
    /// Collective: what rank `root` gives, which others give none.
    pub fn stage(&mut self, root: usize, source: Option<&Source>) -> Result<()> {
        let mut options: ffi::BroadcastOptions = unsafe { sized() };
        options.root = number(root, "root")?;
        checked(unsafe {
            ffi::conclave_refit_stage_broadcast(
                self.refit.handle.0,
                self.communicator.0 .0,
                source.map_or(ptr::null(), |source| source.handle.0),
                &options,
            )
        })
    }

    /// In the place of `stage`, for a rank that has nothing to send, or no use for it.
    pub fn refuse(&mut self, reason: &str) -> Result<()> {
        let reason = c_text("reason", reason)?;
        checked(unsafe {
            ffi::conclave_refit_refuse_broadcast(
                self.refit.handle.0,
                self.communicator.0 .0,
                reason.as_ptr(),
            )
        })
    }

    pub fn commit(&mut self) -> Result<()> {
        self.refit.commit()
    }

    /// Rolls back, and tells the others why: their commit or stage is an error with this rank.
    pub fn withdraw(self, reason: &str) -> Result<()> {
        self.refit.tell_withdrawal(reason)
    }
}

impl<R> Refit<Packed, R> {
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

impl<'w, R> Refit<InPlace<'w>, R> {
    /// The layer reads these arrays from the commit on: they live as long as it does.
    pub fn stage(&mut self, source: &Source<'w>) -> Result<()> {
        stage(&self.handle, source)
    }
}

fn stage(handle: &handle::Refit, source: &Source) -> Result<()> {
    checked(unsafe { ffi::conclave_refit_stage(handle.0, source.handle.0, ptr::null()) })
}

impl<W, R> Refit<W, R> {
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

    /// Rolls back, and tells the other ranks of the layer why, whose commit is an error with this
    /// rank.
    pub fn withdraw(self, reason: &str) -> Result<()> {
        self.tell_withdrawal(reason)
    }

    fn tell_withdrawal(&self, reason: &str) -> Result<()> {
        let reason = c_text("reason", reason)?;
        checked(unsafe { ffi::conclave_refit_withdraw_because(self.handle.0, reason.as_ptr()) })
    }
}
