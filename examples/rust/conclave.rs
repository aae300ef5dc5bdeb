// A safe face of the C interface: objects that end themselves, slices with shapes, and errors as
// values. No pointer and no status leaves this file.
use crate::ffi;
use std::ffi::{CStr, CString};
use std::fmt;
use std::mem::{size_of, zeroed};
use std::os::raw::{c_char, c_void};
use std::ptr;

pub struct Error {
    pub status: i32,
    pub name: String,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{} ({}): {}", self.name, self.status, self.message)
    }
}

pub type Result<T> = std::result::Result<T, Error>;

// Texts of the library end with a zero byte, and the library keeps them for as long as it says.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    CStr::from_ptr(from).to_string_lossy().into_owned()
}

// The error belongs to the thread: nothing may call the library between a failure and this.
fn checked(status: ffi::Status) -> Result<()> {
    if status == ffi::OK {
        return Ok(());
    }
    unsafe {
        let mut error: ffi::Error = sized();
        ffi::conclave_last_error(&mut error);
        Err(Error {
            status,
            name: text(ffi::conclave_status_name(status)),
            message: text(error.message),
        })
    }
}

// Structs of the interface may be zero but for their size, which is the first member of each.
unsafe fn sized<T>() -> T {
    let mut value: T = zeroed();
    (&mut value as *mut T as *mut usize).write(size_of::<T>());
    value
}

fn c_text(from: &str) -> Result<CString> {
    CString::new(from).map_err(|_| Error {
        status: ffi::ERROR_NULL_POINTER,
        name: String::from("CONCLAVE_ERROR_NULL_POINTER"),
        message: format!("{:?} has a zero byte", from),
    })
}

pub fn version() -> String {
    unsafe { text(ffi::conclave_version()) }
}

pub struct Context(*mut ffi::Context);

impl Context {
    pub fn new() -> Result<Context> {
        let mut handle = ptr::null_mut();
        checked(unsafe { ffi::conclave_context_create(ptr::null(), &mut handle) })?;
        Ok(Context(handle))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        unsafe { ffi::conclave_context_destroy(self.0) }
    }
}

pub struct Checkpoint(*mut ffi::Checkpoint);

impl Checkpoint {
    pub fn open(path: &str) -> Result<Checkpoint> {
        let path = c_text(path)?;
        let mut handle = ptr::null_mut();
        checked(unsafe {
            ffi::conclave_checkpoint_open(path.as_ptr(), ptr::null(), &mut handle)
        })?;
        Ok(Checkpoint(handle))
    }

    pub fn model_type(&self) -> Result<String> {
        Ok(unsafe { text(self.info()?.model_type) })
    }

    // The numbers of the model's MoE layers.
    pub fn layers(&self) -> Result<Vec<i64>> {
        let count = self.info()?.num_layers;
        (0..count)
            .map(|position| {
                let mut info: ffi::LayerInfo = unsafe { sized() };
                checked(unsafe {
                    ffi::conclave_checkpoint_get_layer(self.0, position, &mut info)
                })?;
                Ok(info.index)
            })
            .collect()
    }

    fn info(&self) -> Result<ffi::CheckpointInfo> {
        let mut info: ffi::CheckpointInfo = unsafe { sized() };
        checked(unsafe { ffi::conclave_checkpoint_get_info(self.0, &mut info) })?;
        Ok(info)
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        unsafe { ffi::conclave_checkpoint_destroy(self.0) }
    }
}

pub struct Layer {
    handle: *mut ffi::Layer,
    pub num_experts: i64,
    pub hidden_size: usize,
}

// A layer may be used by several threads: the library refuses a second forward without a workspace.
unsafe impl Send for Layer {}
unsafe impl Sync for Layer {}

impl Layer {
    // The layer holds what it needs of the context; the checkpoint is read here only.
    pub fn from_checkpoint(
        context: &Context,
        checkpoint: &Checkpoint,
        index: i64,
        max_tokens: i64,
    ) -> Result<Layer> {
        let mut layer = Layer { handle: ptr::null_mut(), num_experts: 0, hidden_size: 0 };
        unsafe {
            let mut options: ffi::LayerOptions = sized();
            options.max_tokens = max_tokens;
            checked(ffi::conclave_layer_create_from_checkpoint(
                context.0,
                checkpoint.0,
                index,
                &options,
                ptr::null(),
                &mut layer.handle,
            ))?;
            let mut spec = ptr::null_mut();
            checked(ffi::conclave_layer_spec(layer.handle, &mut spec))?;
            let mut info: ffi::SpecInfo = sized();
            let status = ffi::conclave_spec_get_info(spec, &mut info);
            let result = checked(status);
            ffi::conclave_spec_destroy(spec);
            result?;
            layer.num_experts = info.num_experts;
            layer.hidden_size = info.hidden_size as usize;
        }
        Ok(layer)
    }

    // Rows of hidden_size values. The library checks that both have as many.
    pub fn forward(&self, hidden: &[f32], out: &mut [f32]) -> Result<()> {
        unsafe {
            let given = self.rows(hidden.as_ptr() as *mut c_void, hidden.len());
            let written = self.rows(out.as_mut_ptr() as *mut c_void, out.len());
            let mut args: ffi::ForwardArgs = sized();
            args.hidden = &given;
            args.out = &written;
            checked(ffi::conclave_layer_forward(self.handle, &args))
        }
    }

    pub fn tokens(&self) -> Result<i64> {
        let mut stats: ffi::LayerStats = unsafe { sized() };
        checked(unsafe { ffi::conclave_layer_get_stats(self.handle, &mut stats) })?;
        Ok(stats.tokens)
    }

    pub fn explain(&self) -> Result<String> {
        let mut made = ptr::null_mut();
        checked(unsafe { ffi::conclave_layer_explain(self.handle, &mut made) })?;
        unsafe {
            let copy = text(made);
            ffi::conclave_text_free(made);
            Ok(copy)
        }
    }

    // Values that fill no whole row are left out, and so never read or written.
    unsafe fn rows(&self, data: *mut c_void, len: usize) -> ffi::Tensor {
        let mut tensor: ffi::Tensor = sized();
        tensor.data = data;
        tensor.dtype = ffi::DTYPE_F32;
        tensor.rank = 2;
        tensor.shape[0] = (len / self.hidden_size) as i64;
        tensor.shape[1] = self.hidden_size as i64;
        tensor
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        unsafe { ffi::conclave_layer_destroy(self.handle) }
    }
}
