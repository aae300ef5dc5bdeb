// Ranks over a transport of one's own. Bytes are copied on their way in and out, so that a
// transport has owned buffers and no pointer: it may lose an operation, but not write where nothing
// waits any more.
use crate::error::{c_text, sized, text, Result};
use crate::ranks::{milliseconds, number};
use crate::{ffi, handle, Communicator};
use std::collections::HashMap;
use std::ffi::CString;
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `send[r]` goes to rank r.
    AllToAll,
    /// Every rank gets what each has sent, in rank order and in one buffer.
    AllGather,
    /// Every rank gets the reduction of all that is sent, in rank order.
    AllReduce(Element, Reduce),
    /// The same, but rank r gets block r of it alone.
    ReduceScatter(Element, Reduce),
    Barrier,
    Send(usize),
    Recv(usize),
}

/// Elements that every transport reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    F64,
    I32,
    I64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Sum,
    Max,
}

/// What a rank asks for. Ranks number their own operations 1, 2, 3, ... and start collective ones in
/// the same order.
#[derive(Clone, Debug)]
pub struct Operation {
    pub number: u64,
    pub kind: Kind,
    /// A buffer for each rank of `AllToAll`; otherwise one, which may be empty.
    pub send: Vec<Vec<u8>>,
    /// Bytes that `wait` returns, in the same way.
    pub recv_bytes: Vec<usize>,
}

/// Why a communicator has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    PeerLost,
    Timeout,
    Mismatch,
    Aborted,
}

#[derive(Clone, Debug)]
pub struct Failure {
    pub fault: Fault,
    pub peer: Option<usize>,
    pub reason: String,
}

pub type Outcome<T> = std::result::Result<T, Failure>;

/// A transport of one's own, one on each rank. One thread at a time calls `start`, `wait` and
/// `test`; `abort` may come from any at any time. After a failure nothing but `abort` is called.
pub trait Transport: Send + Sync {
    /// Returns at once.
    fn start(&self, operation: Operation) -> Outcome<()>;
    /// What has arrived, within the deadline. A wait moves all that is under way, or ranks that wait
    /// in other orders block each other.
    fn wait(&self, number: u64, deadline: Duration, phase: &str) -> Outcome<Vec<Vec<u8>>>;
    /// Whether the operation is complete, whose wait is still to come. Never blocks.
    fn test(&self, number: u64) -> Outcome<bool>;
    /// Every present and later wait of every rank fails.
    fn abort(&self, reason: &str);
}

impl Communicator {
    /// `name` says in errors which transport it is.
    pub fn over(
        transport: impl Transport + 'static,
        name: &str,
        rank: usize,
        size: usize,
        timeout: Option<Duration>,
    ) -> Result<Communicator> {
        let name = c_text("name", name)?;
        let (rank, size) = (number(rank, "rank")?, number(size, "size")?);
        let own = Box::into_raw(Box::new(Own {
            transport: Box::new(transport),
            size: size.max(0) as usize,
            waiting: Mutex::default(),
            reason: Mutex::default(),
        }));
        let mut table: ffi::OwnCommunicator = unsafe { sized() };
        table.name = name.as_ptr();
        table.user = own as *mut c_void;
        table.rank = rank;
        table.size = size;
        table.timeout_ms = milliseconds(timeout);
        table.start = Some(start);
        table.wait = Some(wait);
        table.test = Some(test);
        table.abort = Some(abort);
        table.release = Some(release);
        let make = |out| unsafe { ffi::conclave_communicator_from_own(&table, out) };
        let made = handle::Communicator::make(make);
        if made.is_err() {
            release(table.user);
        }
        Ok(Communicator(made?))
    }
}

// The buffers of an operation, which the library keeps until its wait has returned.
struct Target {
    buffers: Vec<(*mut u8, usize)>,
}
unsafe impl Send for Target {}

struct Own {
    transport: Box<dyn Transport>,
    size: usize,
    waiting: Mutex<HashMap<u64, Target>>,
    reason: Mutex<CString>, // of the last failure, which the library copies at once
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Own {
    unsafe fn start(&self, given: &ffi::CommOperation) -> Outcome<()> {
        let (send, buffers) = if given.kind == ffi::COMM_KIND_ALL_TO_ALL_V {
            self.pieces_of(given)
        } else {
            let sent = bytes_at(given.send, given.send_bytes);
            (vec![sent], vec![(given.recv as *mut u8, given.recv_bytes)])
        };
        let operation = Operation {
            number: given.number,
            kind: kind_of(given)?,
            send,
            recv_bytes: buffers.iter().map(|(_, bytes)| *bytes).collect(),
        };
        locked(&self.waiting).insert(given.number, Target { buffers });
        self.transport.start(operation)
    }

    unsafe fn pieces_of(
        &self,
        given: &ffi::CommOperation,
    ) -> (Vec<Vec<u8>>, Vec<(*mut u8, usize)>) {
        let at = |array: *const i64, rank: usize| unsafe { *array.add(rank) as usize };
        let sent = |rank| unsafe {
            let bytes = at(given.send_counts, rank);
            let from = (given.send as *const u8).wrapping_add(at(given.send_offsets, rank));
            bytes_at(from as *const c_void, bytes)
        };
        let taken = |rank| {
            let to = (given.recv as *mut u8).wrapping_add(at(given.recv_offsets, rank));
            (to, at(given.recv_counts, rank))
        };
        (
            (0..self.size).map(sent).collect(),
            (0..self.size).map(taken).collect(),
        )
    }

    fn wait(&self, number: u64, deadline: Duration, phase: &str) -> Outcome<()> {
        let target = locked(&self.waiting).remove(&number);
        let arrived = self.transport.wait(number, deadline, phase)?;
        let buffers = target.map_or(Vec::new(), |target| target.buffers);
        let sizes = |list: &[usize]| format!("{:?} bytes", list);
        let expected: Vec<_> = buffers.iter().map(|(_, bytes)| *bytes).collect();
        let found: Vec<_> = arrived.iter().map(Vec::len).collect();
        if expected != found {
            return Err(Failure {
                fault: Fault::Mismatch,
                peer: None,
                reason: format!("{} in place of {}", sizes(&found), sizes(&expected)),
            });
        }
        for ((to, bytes), from) in buffers.into_iter().zip(arrived) {
            if bytes > 0 {
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, bytes) };
            }
        }
        Ok(())
    }

    // No panic may leave a function that C calls: it ends the communicator instead.
    fn answer<T>(
        &self,
        failure: *mut ffi::CommFailure,
        body: impl FnOnce() -> Outcome<T>,
    ) -> std::result::Result<T, ffi::Status> {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(why)) => {
                let mut reason = locked(&self.reason);
                *reason = CString::new(why.reason.replace('\0', " ")).unwrap_or_default();
                unsafe {
                    (*failure).reason = reason.as_ptr();
                    (*failure).peer = why.peer.map_or(-1, |peer| peer as i32);
                }
                Err(status_of(why.fault))
            }
            Err(_) => Err(ffi::ERROR_INTERNAL),
        }
    }
}

unsafe fn bytes_at(data: *const c_void, bytes: usize) -> Vec<u8> {
    if bytes == 0 {
        return Vec::new();
    }
    slice::from_raw_parts(data as *const u8, bytes).to_vec()
}

fn kind_of(given: &ffi::CommOperation) -> Outcome<Kind> {
    let element = match given.dtype {
        ffi::DTYPE_F64 => Element::F64,
        ffi::DTYPE_I32 => Element::I32,
        ffi::DTYPE_I64 => Element::I64,
        _ => Element::F32,
    };
    let reduce = if given.reduce == ffi::REDUCE_OP_MAX {
        Reduce::Max
    } else {
        Reduce::Sum
    };
    Ok(match given.kind {
        ffi::COMM_KIND_ALL_TO_ALL_V => Kind::AllToAll,
        ffi::COMM_KIND_ALL_GATHER => Kind::AllGather,
        ffi::COMM_KIND_ALL_REDUCE => Kind::AllReduce(element, reduce),
        ffi::COMM_KIND_REDUCE_SCATTER => Kind::ReduceScatter(element, reduce),
        ffi::COMM_KIND_BARRIER => Kind::Barrier,
        ffi::COMM_KIND_SEND => Kind::Send(given.peer as usize),
        ffi::COMM_KIND_RECV => Kind::Recv(given.peer as usize),
        other => {
            return Err(Failure {
                fault: Fault::Mismatch,
                peer: None,
                reason: format!("operation {} is of a newer library", other),
            })
        }
    })
}

fn status_of(fault: Fault) -> ffi::Status {
    match fault {
        Fault::PeerLost => ffi::ERROR_COMM_PEER_LOST,
        Fault::Timeout => ffi::ERROR_COMM_TIMEOUT,
        Fault::Mismatch => ffi::ERROR_COMM_MISMATCH,
        Fault::Aborted => ffi::ERROR_COMM_ABORTED,
    }
}

unsafe fn own_of<'a>(user: *mut c_void) -> &'a Own {
    &*(user as *const Own)
}

extern "C" fn start(
    user: *mut c_void,
    operation: *const ffi::CommOperation,
    failure: *mut ffi::CommFailure,
) -> ffi::Status {
    let own = unsafe { own_of(user) };
    own.answer(failure, || unsafe { own.start(&*operation) })
        .map_or_else(|status| status, |()| ffi::OK)
}

extern "C" fn wait(
    user: *mut c_void,
    number: u64,
    deadline_ns: i64,
    phase: *const c_char,
    failure: *mut ffi::CommFailure,
) -> ffi::Status {
    let own = unsafe { own_of(user) };
    let deadline = Duration::from_nanos(deadline_ns.max(0) as u64);
    own.answer(failure, || {
        own.wait(number, deadline, &unsafe { text(phase) })
    })
    .map_or_else(|status| status, |()| ffi::OK)
}

extern "C" fn test(
    user: *mut c_void,
    number: u64,
    complete: *mut i32,
    _phase: *const c_char,
    failure: *mut ffi::CommFailure,
) -> ffi::Status {
    let own = unsafe { own_of(user) };
    match own.answer(failure, || own.transport.test(number)) {
        Ok(is_complete) => {
            unsafe { *complete = is_complete as i32 };
            ffi::OK
        }
        Err(status) => status,
    }
}

extern "C" fn abort(user: *mut c_void, reason: *const c_char) {
    let own = unsafe { own_of(user) };
    // There is nobody to tell of a panic here.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        own.transport.abort(&unsafe { text(reason) })
    }));
}

extern "C" fn release(user: *mut c_void) {
    let _ = catch_unwind(|| unsafe { drop(Box::from_raw(user as *mut Own)) });
}
