// LoRA adapters of a layer's experts, which calls choose by number.
use crate::error::{c_text, checked, made_text, sized, Result};
use crate::{ffi, handle, Checkpoint, Layer, View};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::slice;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    Routed = 0,
    Shared = 1,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matrix {
    Gate = 0,
    Up = 1,
    Down = 2,
}

/// W x becomes W x + scale b (a x): a [r, in], b [out, r].
#[derive(Clone, Copy)]
pub struct Factors<'a> {
    pub mlp: Mlp,
    pub matrix: Matrix,
    pub expert: i64,
    pub a: View<'a>,
    pub b: View<'a>,
    pub scale: f64,
}

/// A directory that PEFT saved.
pub struct LoraCheckpoint(handle::LoraCheckpoint);

impl LoraCheckpoint {
    pub fn open(directory: impl AsRef<Path>) -> Result<LoraCheckpoint> {
        let path = c_text("directory", directory.as_ref().as_os_str().as_bytes())?;
        let make = |out| unsafe { ffi::conclave_lora_checkpoint_open(path.as_ptr(), out) };
        Ok(LoraCheckpoint(handle::LoraCheckpoint::make(make)?))
    }

    /// The layers with factors, by their numbers in the model.
    pub fn layers(&self) -> Result<Vec<i64>> {
        let info = self.info()?;
        if info.num_layers == 0 {
            return Ok(Vec::new());
        }
        Ok(unsafe { slice::from_raw_parts(info.layers, info.num_layers) }.to_vec())
    }

    /// The least `LayerOptions::max_adapter_rank` that has room for it.
    pub fn max_rank(&self) -> Result<i64> {
        Ok(self.info()?.max_rank)
    }

    fn info(&self) -> Result<ffi::LoraCheckpointInfo> {
        let mut info: ffi::LoraCheckpointInfo = unsafe { sized() };
        checked(unsafe { ffi::conclave_lora_checkpoint_get_info(self.0 .0, &mut info) })?;
        Ok(info)
    }
}

impl<W, R> Layer<W, R> {
    /// Copies the factors and returns the adapter's number; forwards may run meanwhile.
    pub fn add_adapter(&self, name: &str, factors: &[Factors]) -> Result<i32> {
        let name = c_text("name", name)?;
        let each: Vec<_> = factors
            .iter()
            .map(|given| {
                let mut of_matrix: ffi::LoraFactors = unsafe { sized() };
                of_matrix.mlp = given.mlp as i32;
                of_matrix.matrix = given.matrix as i32;
                of_matrix.expert = given.expert;
                of_matrix.a = &given.a.tensor;
                of_matrix.b = &given.b.tensor;
                of_matrix.scale = given.scale;
                of_matrix
            })
            .collect();
        let mut adapter: ffi::LoraAdapter = unsafe { sized() };
        adapter.name = name.as_ptr();
        adapter.factors = each.as_ptr();
        adapter.num_factors = each.len();
        let mut id = -1;
        checked(unsafe { ffi::conclave_layer_add_adapter(self.handle.0, &adapter, &mut id) })?;
        Ok(id)
    }

    /// Of what PEFT saved for the layer with this index of `model`.
    pub fn add_adapter_from(
        &self,
        saved: &LoraCheckpoint,
        index: i64,
        model: &Checkpoint,
    ) -> Result<i32> {
        let mut id = -1;
        checked(unsafe {
            ffi::conclave_layer_add_adapter_from_checkpoint(
                self.handle.0,
                saved.0 .0,
                index,
                model.0 .0,
                0,
                &mut id,
            )
        })?;
        Ok(id)
    }

    pub fn remove_adapter(&self, id: i32) -> Result<()> {
        checked(unsafe { ffi::conclave_layer_remove_adapter(self.handle.0, id) })
    }

    /// A JSON list: [{"id": 0, "name": "...", "max_rank": 16, "num_factors": 24, "bytes": 4096}].
    pub fn adapters_json(&self) -> Result<String> {
        made_text(|json| unsafe { ffi::conclave_layer_adapters_json(self.handle.0, json) })
    }
}
