// A layer is made of its surroundings, a description, and weights of files or of arrays.
use crate::error::{c_text, checked, made_text, sized, Result};
use crate::{ffi, handle, Alone, View};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

/// The surroundings of layers on the CPU. Layers hold it: it may be dropped before them.
pub struct Context<R = Alone> {
    pub(crate) handle: handle::Context,
    pub(crate) ranks: R,
}

impl Context {
    /// `num_threads` 0: the CPUs that this process may use.
    pub fn new(num_threads: i32) -> Result<Context> {
        let mut options: ffi::ContextOptions = unsafe { sized() };
        options.num_threads = num_threads;
        let make = |out| unsafe { ffi::conclave_context_create(&options, out) };
        Ok(Context {
            handle: handle::Context::make(make)?,
            ranks: Alone(()),
        })
    }
}

/// The sizes that calls need.
#[derive(Clone, Copy, Debug)]
pub struct SpecInfo {
    pub num_experts: usize,
    pub top_k: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_logits: usize,
    pub num_slots: usize,
}

/// A description of a layer.
pub struct Spec(pub(crate) handle::Spec);

impl Spec {
    pub fn from_json(json: &str) -> Result<Spec> {
        let json = c_text("json", json)?;
        let make = |out| unsafe { ffi::conclave_spec_from_json(json.as_ptr(), out) };
        Ok(Spec(handle::Spec::make(make)?))
    }

    pub fn to_json(&self) -> Result<String> {
        made_text(|json| unsafe { ffi::conclave_spec_to_json(self.0 .0, json) })
    }

    pub fn info(&self) -> Result<SpecInfo> {
        let mut info: ffi::SpecInfo = unsafe { sized() };
        checked(unsafe { ffi::conclave_spec_get_info(self.0 .0, &mut info) })?;
        Ok(SpecInfo {
            num_experts: info.num_experts as usize,
            top_k: info.top_k as usize,
            hidden_size: info.hidden_size as usize,
            intermediate_size: info.intermediate_size as usize,
            num_logits: info.num_logits as usize,
            num_slots: info.num_slots as usize,
        })
    }
}

/// A model directory or a GGUF file.
pub struct Checkpoint(pub(crate) handle::Checkpoint);

impl Checkpoint {
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = c_text("path", path.as_ref().as_os_str().as_bytes())?;
        let make = |out| unsafe { ffi::conclave_checkpoint_open(path.as_ptr(), ptr::null(), out) };
        Ok(Checkpoint(handle::Checkpoint::make(make)?))
    }

    /// The numbers of the model's MoE layers.
    pub fn layers(&self) -> Result<Vec<i64>> {
        let mut info: ffi::CheckpointInfo = unsafe { sized() };
        checked(unsafe { ffi::conclave_checkpoint_get_info(self.0 .0, &mut info) })?;
        let index_at = |position| {
            let mut layer: ffi::LayerInfo = unsafe { sized() };
            checked(unsafe {
                ffi::conclave_checkpoint_get_layer(self.0 .0, position, &mut layer)
            })?;
            Ok(layer.index)
        };
        (0..info.num_layers).map(index_at).collect()
    }
}

/// Weights in arrays of the caller, which are borrowed as long as the source lives.
pub struct Source<'w> {
    pub(crate) handle: handle::Source,
    arrays: PhantomData<&'w ()>,
}

// Says that the arrays outlive it, which a handle of C cannot.
impl Drop for Source<'_> {
    fn drop(&mut self) {}
}

impl<'w> Source<'w> {
    /// The weights of a whole layer, by the names of conclave_source_from_tensors.
    pub fn new(tensors: &[(&str, View<'w>)]) -> Result<Source<'w>> {
        Source::with_options(tensors, unsafe { sized() })
    }

    /// Weights of these experts alone, of a layer that has `num_experts`, for refits.
    pub fn of_experts(
        tensors: &[(&str, View<'w>)],
        num_experts: usize,
        experts: &[i32],
    ) -> Result<Source<'w>> {
        let mut options: ffi::SourceOptions = unsafe { sized() };
        options.num_experts = num_experts as i64;
        options.experts = experts.as_ptr();
        options.experts_count = experts.len();
        Source::with_options(tensors, options)
    }

    fn with_options(
        tensors: &[(&str, View<'w>)],
        options: ffi::SourceOptions,
    ) -> Result<Source<'w>> {
        let names = tensors
            .iter()
            .map(|(name, _)| c_text("name", *name))
            .collect::<Result<Vec<_>>>()?;
        let named: Vec<_> = names
            .iter()
            .zip(tensors)
            .map(|(name, (_, view))| ffi::NamedTensor {
                name: name.as_ptr(),
                tensor: &view.tensor,
            })
            .collect();
        let make = |out| unsafe {
            ffi::conclave_source_from_tensors(named.as_ptr(), named.len(), &options, out)
        };
        Ok(Source {
            handle: handle::Source::make(make)?,
            arrays: PhantomData,
        })
    }
}
