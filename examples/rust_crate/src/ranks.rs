// Ranks that share layers: threads, processes, or whatever a transport of one's own connects.
use crate::error::{c_text, checked, made_text, sized, Error, Result};
use crate::{ffi, handle, Context, Element};
use std::ffi::CString;
use std::marker::PhantomData;
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::time::Duration;

/// One rank of a group. It goes from thread to thread, and one at a time uses it. All ranks make
/// collective calls in the same order; a rank that is lost, late or in disagreement is an error
/// with its number in `peer`, after which only `survivors` is of use.
pub struct Communicator(pub(crate) handle::Communicator);

/// Elements that `all_reduce` adds up.
pub trait Reduced: Element {}
impl Reduced for f32 {}
impl Reduced for i32 {}
impl Reduced for i64 {}

/// Gives this rank's text to all and returns those of all ranks, in rank order.
pub type Exchange<'a> = dyn FnMut(&str) -> std::result::Result<Vec<String>, String> + 'a;

/// How a process joins its group. Without a size rank and size are the launcher's.
#[derive(Default)]
pub struct Connect<'a> {
    pub rank: usize,
    pub size: usize,
    pub meeting_point: Option<&'a str>,
    pub exchange: Option<&'a mut Exchange<'a>>,
    pub group: Option<i32>,
    pub timeout: Option<Duration>,
}

/// Ranks as threads of this process: each takes one of these. Without a timeout a wait has 30 s.
pub fn local_group(num_ranks: usize, timeout: Option<Duration>) -> Result<Vec<Communicator>> {
    let count = number(num_ranks, "num_ranks")?;
    let mut made = vec![ptr::null_mut(); num_ranks];
    checked(unsafe { ffi::conclave_local_group(count, milliseconds(timeout), made.as_mut_ptr()) })?;
    let own = |handle| Communicator(handle::Communicator(handle));
    Ok(made.into_iter().map(own).collect())
}

/// A JSON list of the transports that the library has, or why not.
pub fn transports_json() -> Result<String> {
    made_text(|json| unsafe { ffi::conclave_transports_json(json) })
}

impl Communicator {
    /// Collective, by "mpi", "tcp" or another name of `transports_json`.
    pub fn connect(transport: &str, mut given: Connect) -> Result<Communicator> {
        let transport = c_text("transport", transport)?;
        let meeting_point = given
            .meeting_point
            .map(|text| c_text("meeting_point", text))
            .transpose()?;
        let mut exchanging = given.exchange.take().map(Exchanging::new);
        let mut options: ffi::ConnectOptions = unsafe { sized() };
        options.rank = number(given.rank, "rank")?;
        options.size = number(given.size, "size")?;
        options.meeting_point = meeting_point
            .as_ref()
            .map_or(ptr::null(), |text| text.as_ptr());
        if let Some(exchanging) = &mut exchanging {
            options.exchange = Some(exchange);
            options.exchange_user = exchanging as *mut Exchanging as *mut c_void;
        }
        if let Some(group) = given.group {
            options.group = group;
            options.flags = ffi::CONNECT_HAS_GROUP;
        }
        options.timeout_ms = milliseconds(given.timeout);
        let make = |out| unsafe { ffi::conclave_connect(transport.as_ptr(), &options, out) };
        let made = handle::Communicator::make(make);
        match exchanging.and_then(|exchanging| exchanging.failure) {
            // What the exchange said tells more than that it failed.
            Some(reason) if made.is_err() => Err(Error::of_argument(
                ffi::ERROR_COMM_ABORTED,
                "exchange",
                reason,
            )),
            _ => Ok(Communicator(made?)),
        }
    }

    pub fn rank(&self) -> Result<usize> {
        Ok(self.info()?.rank as usize)
    }

    pub fn size(&self) -> Result<usize> {
        Ok(self.info()?.size as usize)
    }

    fn info(&self) -> Result<ffi::CommunicatorInfo> {
        let mut info: ffi::CommunicatorInfo = unsafe { sized() };
        checked(unsafe { ffi::conclave_communicator_get_info(self.0 .0, &mut info) })?;
        Ok(info)
    }

    /// `phase` names the step in errors.
    pub fn barrier(&mut self, phase: &str) -> Result<()> {
        let phase = c_text("phase", phase)?;
        checked(unsafe { ffi::conclave_communicator_barrier(self.0 .0, phase.as_ptr()) })
    }

    /// The elements of every rank, which all have as many, in rank order.
    pub fn all_gather<T: Element + Default>(&mut self, mine: &[T], phase: &str) -> Result<Vec<T>> {
        let phase = c_text("phase", phase)?;
        let mut all = vec![T::default(); mine.len() * self.size()?];
        checked(unsafe {
            ffi::conclave_communicator_all_gather(
                self.0 .0,
                mine.as_ptr() as *const c_void,
                all.as_mut_ptr() as *mut c_void,
                std::mem::size_of_val(mine),
                phase.as_ptr(),
            )
        })?;
        Ok(all)
    }

    /// The sums over ranks, element by element.
    pub fn all_reduce<T: Reduced + Default>(&mut self, mine: &[T], phase: &str) -> Result<Vec<T>> {
        let phase = c_text("phase", phase)?;
        let mut sums = vec![T::default(); mine.len()];
        checked(unsafe {
            ffi::conclave_communicator_all_reduce(
                self.0 .0,
                mine.as_ptr() as *const c_void,
                sums.as_mut_ptr() as *mut c_void,
                mine.len(),
                T::DTYPE,
                phase.as_ptr(),
            )
        })?;
        Ok(sums)
    }

    /// Every present and later wait of every rank fails with this reason.
    pub fn abort(&mut self, reason: &str) -> Result<()> {
        let reason = c_text("reason", reason)?;
        checked(unsafe { ffi::conclave_communicator_abort(self.0 .0, reason.as_ptr()) })
    }

    /// Goes on after a failure: the ranks that are left, and which one of old each of them was.
    pub fn survivors(&mut self, timeout: Option<Duration>) -> Result<(Communicator, Vec<usize>)> {
        let mut old_ranks = vec![0i32; self.size()?];
        let left = Communicator(handle::Communicator::make(|out| unsafe {
            ffi::conclave_survivors(
                self.0 .0,
                milliseconds(timeout),
                out,
                old_ranks.as_mut_ptr(),
            )
        })?);
        old_ranks.truncate(left.size()?);
        Ok((left, old_ranks.iter().map(|rank| *rank as usize).collect()))
    }
}

/// A context without ranks, and what is made of it: threads may share them.
pub struct Alone(pub(crate) ());
/// A context that has a communicator, and all that is made of it: they stay on the thread that made
/// the context, since whatever one of them does uses the one communicator.
pub struct OnRanks {
    communicator: Communicator, // lent to nobody: who has it could take it to another thread
    stays: PhantomData<*const ()>,
}

impl Context<OnRanks> {
    /// Takes the communicator, which layers of the context then use and nobody else.
    pub fn on_ranks(num_threads: i32, communicator: Communicator) -> Result<Context<OnRanks>> {
        let mut options: ffi::ContextOptions = unsafe { sized() };
        options.num_threads = num_threads;
        options.communicator = communicator.0 .0;
        let make = |out| unsafe { ffi::conclave_context_create(&options, out) };
        Ok(Context {
            handle: handle::Context::make(make)?,
            ranks: OnRanks {
                communicator,
                stays: PhantomData,
            },
        })
    }

    /// Collective, between forwards.
    pub fn barrier(&mut self, phase: &str) -> Result<()> {
        self.ranks.communicator.barrier(phase)
    }

    /// As `Communicator::survivors`, after a forward has failed.
    pub fn survivors(&mut self, timeout: Option<Duration>) -> Result<(Communicator, Vec<usize>)> {
        self.ranks.communicator.survivors(timeout)
    }
}

pub(crate) fn number(value: usize, name: &str) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        let what = format!("{} is beyond 32 bits", value);
        Error::of_argument(ffi::ERROR_INVALID_ARGUMENT, name, what)
    })
}

// 0 is the library's default.
pub(crate) fn milliseconds(timeout: Option<Duration>) -> i64 {
    timeout.map_or(0, |time| time.as_millis().clamp(1, i64::MAX as u128) as i64)
}

// The texts of the last exchange, which the library reads until the next one.
struct Exchanging<'a> {
    body: &'a mut Exchange<'a>,
    texts: Vec<CString>,
    failure: Option<String>,
}

impl<'a> Exchanging<'a> {
    fn new(body: &'a mut Exchange<'a>) -> Exchanging<'a> {
        Exchanging {
            body,
            texts: Vec::new(),
            failure: None,
        }
    }

    fn run(&mut self, mine: &str, num_ranks: usize) -> std::result::Result<(), String> {
        let texts = (self.body)(mine)?;
        if texts.len() != num_ranks {
            return Err(format!("{} texts for {} ranks", texts.len(), num_ranks));
        }
        let with_ends = texts.into_iter().map(CString::new);
        self.texts = with_ends
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| error.to_string())?;
        Ok(())
    }
}

extern "C" fn exchange(
    user: *mut c_void,
    mine: *const c_char,
    num_ranks: i32,
    all: *mut *const c_char,
) -> ffi::Status {
    let exchanging = unsafe { &mut *(user as *mut Exchanging) };
    let mine = unsafe { crate::error::text(mine) };
    let run = AssertUnwindSafe(|| exchanging.run(&mine, num_ranks as usize));
    let failure = match catch_unwind(run) {
        Ok(Ok(())) => None,
        Ok(Err(reason)) => Some(reason),
        Err(_) => Some(String::from("the exchange panicked")),
    };
    if failure.is_some() {
        exchanging.failure = failure;
        return ffi::ERROR_COMM_ABORTED;
    }
    for (rank, text) in exchanging.texts.iter().enumerate() {
        unsafe { *all.add(rank) = text.as_ptr() };
    }
    ffi::OK
}
