// Errors as values, with every field that the library gives.
use crate::ffi;
use std::ffi::{CStr, CString};
use std::fmt;
use std::mem::{size_of, zeroed};
use std::os::raw::c_char;

#[derive(Clone, Debug)]
pub struct Error {
    pub status: i32,
    pub name: String,    // "CONCLAVE_ERROR_SHAPE"
    pub message: String, // all of what follows on one line
    pub what: String,
    pub file: String,
    pub tensor: String,
    pub expected: String,
    pub found: String,
    pub limit: String,
    pub hint: String,
    pub phase: String,
    pub peer: i32, // the rank to blame for an error of communication, otherwise -1
}

pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{} ({}): {}", self.name, self.status, self.message)
    }
}

impl std::error::Error for Error {}

impl Error {
    // Serves arguments that cannot be handed to C at all.
    pub(crate) fn of_argument(status: ffi::Status, tensor: &str, what: String) -> Error {
        Error {
            status,
            name: unsafe { text(ffi::conclave_status_name(status)) },
            message: format!("{}: {}", tensor, what),
            what,
            file: String::new(),
            tensor: String::from(tensor),
            expected: String::new(),
            found: String::new(),
            limit: String::new(),
            hint: String::new(),
            phase: String::new(),
            peer: -1,
        }
    }
}

// Texts of the library end with a zero byte, and live until the next failure of this thread.
pub(crate) unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    CStr::from_ptr(from).to_string_lossy().into_owned()
}

// The error belongs to the thread: nothing may call the library between a failure and this.
pub(crate) fn checked(status: ffi::Status) -> Result<()> {
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
            what: text(error.what),
            file: text(error.file),
            tensor: text(error.tensor),
            expected: text(error.expected),
            found: text(error.found),
            limit: text(error.limit),
            hint: text(error.hint),
            phase: text(error.phase),
            peer: error.peer,
        })
    }
}

// Structs of the interface may be zero but for their size, which is the first member of each.
pub(crate) unsafe fn sized<T>() -> T {
    let mut value: T = zeroed();
    (&mut value as *mut T as *mut usize).write(size_of::<T>());
    value
}

// A text that the library has made and that is freed by it.
pub(crate) fn made_text(call: impl FnOnce(*mut *mut c_char) -> ffi::Status) -> Result<String> {
    let mut made = std::ptr::null_mut();
    checked(call(&mut made))?;
    unsafe {
        let copy = text(made);
        ffi::conclave_text_free(made);
        Ok(copy)
    }
}

pub(crate) fn c_text(name: &str, from: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(from).map_err(|error| {
        let what = format!("a text has a zero byte at {}", error.nul_position());
        Error::of_argument(ffi::ERROR_INVALID_ARGUMENT, name, what)
    })
}
