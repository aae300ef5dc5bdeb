// Models that are written anew with their experts in another form.
use crate::error::{c_text, checked, made_text, sized, text, Error, Result};
use crate::{ffi, handle, Context};
use std::ffi::CString;
use std::ops::ControlFlow;
use std::os::raw::c_void;
use std::os::unix::ffi::OsStrExt;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};

/// Is told the phase, and how many bytes of how many of it are done; a break is a reason to end, with
/// `CONCLAVE_ERROR_CANCELLED`.
pub type Progress<'a> = dyn FnMut(&str, u64, u64) -> ControlFlow<String> + 'a;

/// Without layers all are converted; zeros are the library's defaults.
#[derive(Default)]
pub struct ConvertOptions<'a> {
    pub layers: &'a [i64],
    pub shard_bytes: u64,
    /// Random rows on which outputs are compared.
    pub tokens: i64,
    pub seed: u64,
    /// In place of a model or an unfinished conversion of that name.
    pub replaces: bool,
    pub progress: Option<&'a mut Progress<'a>>,
}

#[derive(Clone, Debug)]
pub struct Conversion {
    /// As `Checkpoint::open` takes it.
    pub model: PathBuf,
    pub bytes_before: u64,
    pub bytes_after: u64,
    pub relative_error: f64,
    pub worst_error: f64,
    /// The text of conversion.json.
    pub report: String,
}

/// A JSON list of the formats that models are converted to.
pub fn convert_formats_json() -> Result<String> {
    made_text(|json| unsafe { ffi::conclave_convert_formats_json(json) })
}

/// Writes the model at `source` into the directory `destination`. What fails or is ended leaves
/// nothing there.
pub fn convert_model<R>(
    context: &Context<R>,
    source: impl AsRef<Path>,
    destination: impl AsRef<Path>,
    format: &str,
    mut given: ConvertOptions,
) -> Result<Conversion> {
    let source = c_text("source", source.as_ref().as_os_str().as_bytes())?;
    let destination = c_text("destination", destination.as_ref().as_os_str().as_bytes())?;
    let format = c_text("format", format)?;
    let mut options: ffi::ConvertOptions = unsafe { sized() };
    options.layers = given.layers.as_ptr();
    options.layers_count = given.layers.len();
    options.shard_bytes = given.shard_bytes;
    options.tokens = given.tokens;
    options.seed = given.seed;
    options.existing = given.replaces as i32;
    let mut watching = given.progress.take().map(Watching::new);
    if let Some(watching) = &mut watching {
        options.progress = Some(progress);
        options.progress_user = watching as *mut Watching as *mut c_void;
    }
    let made = handle::Conversion::make(|out| unsafe {
        ffi::conclave_convert_model(
            context.handle.0,
            source.as_ptr(),
            destination.as_ptr(),
            format.as_ptr(),
            &options,
            out,
        )
    });
    if let Some(panic) = watching.and_then(|watching| watching.panic) {
        resume_unwind(panic);
    }
    read(&made?)
}

fn read(made: &handle::Conversion) -> Result<Conversion> {
    let mut info: ffi::ConversionInfo = unsafe { sized() };
    checked(unsafe { ffi::conclave_conversion_get_info(made.0, &mut info) })?;
    if info.model.is_null() {
        let what = String::from("a conversion has no model");
        return Err(Error::of_argument(ffi::ERROR_INTERNAL, "model", what));
    }
    let model = unsafe { std::ffi::CStr::from_ptr(info.model) };
    Ok(Conversion {
        model: PathBuf::from(std::ffi::OsStr::from_bytes(model.to_bytes())),
        bytes_before: info.bytes_before,
        bytes_after: info.bytes_after,
        relative_error: info.relative_error,
        worst_error: info.worst_error,
        report: made_text(|json| unsafe { ffi::conclave_conversion_json(made.0, json) })?,
    })
}

struct Watching<'a> {
    body: &'a mut Progress<'a>,
    reason: CString, // the library copies it at once
    panic: Option<Box<dyn std::any::Any + Send>>,
}

impl<'a> Watching<'a> {
    fn new(body: &'a mut Progress<'a>) -> Watching<'a> {
        Watching {
            body,
            reason: CString::default(),
            panic: None,
        }
    }
}

// A panic ends the conversion, and goes on when the library has returned.
extern "C" fn progress(user: *mut c_void, told: *mut ffi::ConvertProgress) -> ffi::Status {
    let (watching, told) = unsafe { (&mut *(user as *mut Watching), &mut *told) };
    let phase = unsafe { text(told.phase) };
    let body = AssertUnwindSafe(|| (watching.body)(&phase, told.done as u64, told.total as u64));
    match catch_unwind(body) {
        Ok(ControlFlow::Continue(())) => ffi::OK,
        Ok(ControlFlow::Break(reason)) => {
            watching.reason = CString::new(reason.replace('\0', " ")).unwrap_or_default();
            told.reason = watching.reason.as_ptr();
            ffi::ERROR_CANCELLED
        }
        Err(panic) => {
            watching.panic = Some(panic);
            ffi::ERROR_INTERNAL
        }
    }
}
