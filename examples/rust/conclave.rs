// A safe face of the C interface: objects that end themselves, slices with shapes, and errors as
// values. No pointer and no status leaves this file.
use crate::ffi;
use std::ffi::{CStr, CString};
use std::fmt;
use std::mem::{size_of, zeroed};
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::slice;

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

// Rows that a router of this program's own reads, one token after another, and those that it fills.
pub struct Rows<'a> {
    pub top_k: usize,
    pub num_experts: usize,
    pub num_logits: usize,
    pub first_token: usize,
    pub logits: &'a [f32],
    pub ids: &'a mut [i32],
    pub weights: &'a mut [f32],
}

// It runs on the threads of forwards, several at the same time.
type Rule = Box<dyn Fn(&mut Rows) + Send + Sync>;

// No panic may leave a function that C calls: it ends the call with an error instead.
extern "C" fn route(user: *mut c_void, call: *mut ffi::RouteCall) -> ffi::Status {
    let result = catch_unwind(AssertUnwindSafe(|| unsafe {
        let call = &*call;
        let slots = (call.num_tokens * call.top_k) as usize;
        let values = (call.num_tokens * call.num_logits) as usize;
        let mut rows = Rows {
            top_k: call.top_k as usize,
            num_experts: call.num_experts as usize,
            num_logits: call.num_logits as usize,
            first_token: call.first_token as usize,
            logits: if call.logits.is_null() {
                &[]
            } else {
                slice::from_raw_parts(call.logits, values)
            },
            ids: slice::from_raw_parts_mut(call.topk_ids, slots),
            weights: slice::from_raw_parts_mut(call.topk_weights, slots),
        };
        (*(user as *const Rule))(&mut rows)
    }));
    match result {
        Ok(()) => ffi::OK,
        Err(_) => ffi::ERROR_INTERNAL,
    }
}

extern "C" fn release(user: *mut c_void) {
    unsafe { drop(Box::from_raw(user as *mut Rule)) }
}

pub struct Context(*mut ffi::Context);

impl Context {
    // The rule lives until the context and all that was made of it have ended.
    pub fn add_router(
        &self,
        name: &str,
        rule: impl Fn(&mut Rows) + Send + Sync + 'static,
    ) -> Result<()> {
        let name = c_text(name)?;
        let user = Box::into_raw(Box::new(Box::new(rule) as Rule)) as *mut c_void;
        let status = unsafe {
            let mut router: ffi::OwnRouter = sized();
            router.name = name.as_ptr();
            router.user = user;
            router.route = Some(route);
            router.release = Some(release);
            ffi::conclave_context_add_router(self.0, &router)
        };
        if status != ffi::OK {
            release(user);
        }
        checked(status)
    }

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

// Routing on its own, by the rule that a spec names.
pub struct Router {
    handle: *mut ffi::Router,
    top_k: usize,
    num_logits: usize,
}

impl Router {
    pub fn new(context: &Context, json: &str) -> Result<Router> {
        let json = c_text(json)?;
        let mut spec = ptr::null_mut();
        let mut router = Router { handle: ptr::null_mut(), top_k: 0, num_logits: 0 };
        unsafe {
            checked(ffi::conclave_spec_from_json(json.as_ptr(), &mut spec))?;
            let mut info: ffi::SpecInfo = sized();
            let result = checked(ffi::conclave_spec_get_info(spec, &mut info)).and_then(|()| {
                checked(ffi::conclave_router_create(context.0, spec, &mut router.handle))
            });
            ffi::conclave_spec_destroy(spec);
            result?;
            router.top_k = info.top_k as usize;
            router.num_logits = info.num_logits as usize;
        }
        Ok(router)
    }

    // Ids and weights of each row of logits, top_k of each one after another.
    pub fn route(&self, logits: &[f32]) -> Result<(Vec<i32>, Vec<f32>)> {
        let tokens = logits.len() / self.num_logits;
        let mut ids = vec![0i32; tokens * self.top_k];
        let mut weights = vec![0f32; ids.len()];
        unsafe {
            let given = matrix(logits.as_ptr() as *mut c_void, tokens, self.num_logits);
            let mut id_rows = matrix(ids.as_mut_ptr() as *mut c_void, tokens, self.top_k);
            id_rows.dtype = ffi::DTYPE_I32;
            let weight_rows = matrix(weights.as_mut_ptr() as *mut c_void, tokens, self.top_k);
            let mut args: ffi::RouteArgs = sized();
            args.logits = &given;
            args.topk_ids = &id_rows;
            args.topk_weights = &weight_rows;
            checked(ffi::conclave_router_route(self.handle, &args))?;
        }
        Ok((ids, weights))
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        unsafe { ffi::conclave_router_destroy(self.handle) }
    }
}

unsafe fn matrix(data: *mut c_void, rows: usize, cols: usize) -> ffi::Tensor {
    let mut tensor: ffi::Tensor = sized();
    tensor.data = data;
    tensor.dtype = ffi::DTYPE_F32;
    tensor.rank = 2;
    tensor.shape[0] = rows as i64;
    tensor.shape[1] = cols as i64;
    tensor
}

// Low-rank factors of one expert's down product: a [rank, width], b [hidden_size, rank].
pub struct DownFactors<'a> {
    pub expert: i64,
    pub a: &'a [f32],
    pub b: &'a [f32],
    pub scale: f64,
}

pub struct Layer {
    handle: *mut ffi::Layer,
    pub num_experts: i64,
    pub hidden_size: usize,
    pub width: usize,
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
        max_adapter_rank: i64,
    ) -> Result<Layer> {
        let mut layer =
            Layer { handle: ptr::null_mut(), num_experts: 0, hidden_size: 0, width: 0 };
        unsafe {
            let mut options: ffi::LayerOptions = sized();
            options.max_tokens = max_tokens;
            options.max_adapter_rank = max_adapter_rank;
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
            layer.width = info.intermediate_size as usize;
        }
        Ok(layer)
    }

    // Copies the factors; other threads may run forwards meanwhile.
    pub fn add_adapter(&self, factors: &DownFactors) -> Result<i32> {
        let rank = factors.a.len() / self.width;
        let mut id = -1;
        unsafe {
            let a = matrix(factors.a.as_ptr() as *mut c_void, rank, self.width);
            let rows = factors.b.len().checked_div(rank).unwrap_or(0);
            let b = matrix(factors.b.as_ptr() as *mut c_void, rows, rank);
            let mut of_matrix: ffi::LoraFactors = sized();
            of_matrix.matrix = ffi::WEIGHT_MATRIX_DOWN;
            of_matrix.expert = factors.expert;
            of_matrix.a = &a;
            of_matrix.b = &b;
            of_matrix.scale = factors.scale;
            let mut adapter: ffi::LoraAdapter = sized();
            adapter.factors = &of_matrix;
            adapter.num_factors = 1;
            checked(ffi::conclave_layer_add_adapter(self.handle, &adapter, &mut id))?;
        }
        Ok(id)
    }

    pub fn remove_adapter(&self, id: i32) -> Result<()> {
        checked(unsafe { ffi::conclave_layer_remove_adapter(self.handle, id) })
    }

    // Rows of hidden_size values. The library checks that both have as many.
    pub fn forward(&self, hidden: &[f32], out: &mut [f32], adapter: Option<i32>) -> Result<()> {
        unsafe {
            let given = self.rows(hidden.as_ptr() as *mut c_void, hidden.len());
            let written = self.rows(out.as_mut_ptr() as *mut c_void, out.len());
            let mut args: ffi::ForwardArgs = sized();
            args.hidden = &given;
            args.out = &written;
            args.adapter = adapter.as_ref().map_or(ptr::null(), |id| id as *const i32);
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
        matrix(data, len / self.hidden_size, self.hidden_size)
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        unsafe { ffi::conclave_layer_destroy(self.handle) }
    }
}
