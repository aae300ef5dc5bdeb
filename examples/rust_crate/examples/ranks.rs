//! Ranks that share a layer's experts: as threads of the library, over TCP, and over a transport that
//! this program brings, with the bits of one rank; weights of one rank for all; and a model that is
//! written anew in another form.
use conclave::own::{Element, Failure, Fault, Kind, Operation, Outcome, Reduce, Transport};
use conclave::{
    convert_model, local_group, Call, Checkpoint, Communicator, Connect, Context, ConvertOptions,
    Error, Layer, LayerOptions, RefitOptions, Result, Source, Spec, View, ViewMut,
};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const RANKS: usize = 2;
const TOKENS: usize = 6;
const EXPERTS: usize = 4;
const HIDDEN: usize = 32;
const WIDTH: usize = 16;
const SPEC: &str = r#"{"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16,
                       "weight_dtype": "F32"}"#;

fn numbers(count: usize, size: f32, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|i| size * ((i + 1) as f32 * (1.0 + 0.37 * seed as f32)).sin())
        .collect()
}

fn refused<T>(result: Result<T>, name: &str) -> Error {
    match result {
        Ok(_) => panic!("what should be {} succeeded", name),
        Err(error) => {
            assert_eq!(error.name, name, "{}", error);
            println!("as it should, {}", error);
            error
        }
    }
}

fn forward<W, R>(layer: &Layer<W, R>, hidden: &[f32]) -> Result<Vec<f32>> {
    let shape = [
        hidden.len() / layer.info.hidden_size,
        layer.info.hidden_size,
    ];
    let mut out = vec![0.0; hidden.len()];
    layer.forward(Call::new(
        View::new(hidden, &shape)?,
        ViewMut::new(&mut out, &shape)?,
    ))?;
    Ok(out)
}

fn rows_of(rank: usize, width: usize) -> Vec<f32> {
    numbers((TOKENS + rank) * width, 1.0, rank)
}

// Each rank has other rows, and the results that one rank alone has for them.
fn serve(model: &str, communicator: Communicator) -> Result<()> {
    let (rank, size) = (communicator.rank()?, communicator.size()?);
    let mut context = Context::on_ranks(1, communicator)?;
    let checkpoint = Checkpoint::open(model)?;
    let split = LayerOptions {
        ep_size: size as i32,
        ep_rank: rank as i32,
        ..LayerOptions::default()
    };
    let layer = Layer::from_checkpoint(&context, &checkpoint, 0, split)?;
    let alone = Context::new(1)?;
    let whole = Layer::from_checkpoint(&alone, &checkpoint, 0, LayerOptions::default())?;
    let hidden = rows_of(rank, layer.info.hidden_size);
    for _ in 0..3 {
        assert!(
            forward(&layer, &hidden)? == forward(&whole, &hidden)?,
            "ranks have other bits than one"
        );
    }
    context.barrier("the end")
}

// The body on a thread for each rank.
fn on_threads<T: Send>(
    ranks: Vec<T>,
    body: impl Fn(usize, T) -> Result<()> + Send + Sync,
) -> Result<()> {
    let body = &body;
    thread::scope(|threads| {
        let started: Vec<_> = ranks
            .into_iter()
            .enumerate()
            .map(|(rank, mine)| threads.spawn(move || body(rank, mine)))
            .collect();
        started
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })
}

fn collectives(mut communicator: Communicator) -> Result<()> {
    let rank = communicator.rank()? as i32;
    assert!(communicator.all_gather(&[rank, 7], "gather")? == [0, 7, 1, 7]);
    assert!(communicator.all_reduce(&[1.5f32, rank as f32], "sum")? == [3.0, 1.0]);
    communicator.barrier("together")?;
    // One ends while the other waits for it.
    if rank == 1 {
        return Ok(());
    }
    let error = refused(
        communicator.barrier("alone"),
        "CONCLAVE_ERROR_COMM_PEER_LOST",
    );
    assert!(error.peer == 1 && error.phase == "alone", "{}", error);
    Ok(())
}

// Texts that ranks in threads exchange; processes would send them to each other.
struct Board {
    texts: Mutex<Vec<String>>,
    turn: Barrier,
}

fn over_tcp(model: &str) -> Result<()> {
    let board = Board {
        texts: Mutex::new(vec![String::new(); RANKS]),
        turn: Barrier::new(RANKS),
    };
    on_threads(vec![(); RANKS], |rank, ()| {
        let mut exchange = |mine: &str| {
            board.texts.lock().expect("no panic")[rank] = String::from(mine);
            board.turn.wait();
            let all = board.texts.lock().expect("no panic").clone();
            board.turn.wait();
            Ok(all)
        };
        let given = Connect {
            rank,
            size: RANKS,
            exchange: Some(&mut exchange),
            timeout: Some(Duration::from_secs(20)),
            ..Connect::default()
        };
        serve(model, Communicator::connect("tcp", given)?)
    })?;
    let mut silent = |_: &str| Err(String::from("nobody is there"));
    let given = Connect {
        size: RANKS,
        exchange: Some(&mut silent),
        ..Connect::default()
    };
    let error = refused(
        Communicator::connect("tcp", given).map(|_| ()),
        "CONCLAVE_ERROR_COMM_ABORTED",
    );
    assert!(error.message.contains("nobody is there"), "{}", error);
    Ok(())
}

// A transport of this program: ranks leave what they send in one room, under a key that all work
// out alike, and whoever waits takes it from there.
#[derive(Default)]
struct Room {
    sent: HashMap<(usize, u64, usize, usize), Vec<u8>>, // kind of turn, turn, from, to
    ended: Option<String>,
}

struct Hub {
    room: Mutex<Room>,
    news: Condvar,
}

struct Rank {
    hub: Arc<Hub>,
    rank: usize,
    state: Mutex<RankState>,
}

#[derive(Default)]
struct RankState {
    collectives: u64,
    sends: HashMap<usize, u64>,
    recvs: HashMap<usize, u64>,
    waiting: HashMap<u64, (Operation, u64)>,
}

const COLLECTIVE: usize = 0;
const MESSAGE: usize = 1;

impl Rank {
    // The buffers that this operation waits for, in rank order, once all are there.
    fn arrived(&self, room: &Room, operation: &Operation, turn: u64) -> Option<Vec<Vec<u8>>> {
        match operation.kind {
            Kind::Send(_) => Some(vec![Vec::new()]),
            Kind::Recv(peer) => {
                let key = (MESSAGE, turn, peer, self.rank);
                room.sent.get(&key).map(|bytes| vec![bytes.clone()])
            }
            _ => (0..RANKS)
                .map(|from| room.sent.get(&(COLLECTIVE, turn, from, self.rank)).cloned())
                .collect(),
        }
    }

    fn result(&self, operation: &Operation, parts: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        match operation.kind {
            Kind::AllToAll | Kind::Recv(_) | Kind::Send(_) => parts,
            Kind::AllGather | Kind::Barrier => vec![parts.concat()],
            Kind::AllReduce(element, reduce) => vec![reduced(&parts, element, reduce)],
            Kind::ReduceScatter(element, reduce) => {
                let all = reduced(&parts, element, reduce);
                let bytes = operation.recv_bytes[0];
                vec![all[self.rank * bytes..][..bytes].to_vec()]
            }
        }
    }
}

// Element by element, in rank order, so that every run has the same bits.
fn reduced(parts: &[Vec<u8>], element: Element, reduce: Reduce) -> Vec<u8> {
    macro_rules! reduce_as {
        ($number:ty) => {{
            let size = std::mem::size_of::<$number>();
            let read = |bytes: &[u8]| <$number>::from_ne_bytes(bytes.try_into().expect("whole"));
            let join = |a: $number, b: $number| match reduce {
                Reduce::Sum => a + b,
                Reduce::Max => {
                    if b > a {
                        b
                    } else {
                        a
                    }
                }
            };
            let mut all: Vec<$number> = parts[0].chunks(size).map(read).collect();
            for part in &parts[1..] {
                for (to, from) in all.iter_mut().zip(part.chunks(size)) {
                    *to = join(*to, read(from));
                }
            }
            all.iter().flat_map(|value| value.to_ne_bytes()).collect()
        }};
    }
    match element {
        Element::F32 => reduce_as!(f32),
        Element::F64 => reduce_as!(f64),
        Element::I32 => reduce_as!(i32),
        Element::I64 => reduce_as!(i64),
    }
}

impl Transport for Rank {
    fn start(&self, operation: Operation) -> Outcome<()> {
        let mut state = self.state.lock().expect("no panic");
        let mut room = self.hub.room.lock().expect("no panic");
        let next = |turns: &mut u64| {
            *turns += 1;
            *turns
        };
        let turn = match operation.kind {
            Kind::Send(peer) => {
                let turn = next(state.sends.entry(peer).or_default());
                let key = (MESSAGE, turn, self.rank, peer);
                room.sent.insert(key, operation.send[0].clone());
                turn
            }
            Kind::Recv(peer) => next(state.recvs.entry(peer).or_default()),
            kind => {
                let turn = next(&mut state.collectives);
                for to in 0..RANKS {
                    let piece = if kind == Kind::AllToAll { to } else { 0 };
                    let key = (COLLECTIVE, turn, self.rank, to);
                    room.sent.insert(key, operation.send[piece].clone());
                }
                turn
            }
        };
        state.waiting.insert(operation.number, (operation, turn));
        self.hub.news.notify_all();
        Ok(())
    }

    fn wait(&self, number: u64, deadline: Duration, phase: &str) -> Outcome<Vec<Vec<u8>>> {
        let end = Instant::now() + deadline;
        let mut state = self.state.lock().expect("no panic");
        let (operation, turn) = state.waiting.remove(&number).expect("it was started");
        let mut room = self.hub.room.lock().expect("no panic");
        loop {
            if let Some(parts) = self.arrived(&room, &operation, turn) {
                return Ok(self.result(&operation, parts));
            }
            let failure = |fault, reason| Failure {
                fault,
                peer: Some(1 - self.rank),
                reason,
            };
            if let Some(reason) = &room.ended {
                return Err(failure(Fault::Aborted, reason.clone()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = format!("rank {} did not come to {}", 1 - self.rank, phase);
                return Err(failure(Fault::Timeout, reason));
            }
            room = self.hub.news.wait_timeout(room, left).expect("no panic").0;
        }
    }

    fn test(&self, number: u64) -> Outcome<bool> {
        let state = self.state.lock().expect("no panic");
        let room = self.hub.room.lock().expect("no panic");
        let (operation, turn) = &state.waiting[&number];
        Ok(self.arrived(&room, operation, *turn).is_some())
    }

    fn abort(&self, reason: &str) {
        self.hub.room.lock().expect("no panic").ended = Some(String::from(reason));
        self.hub.news.notify_all();
    }
}

fn own_group(timeout: Duration) -> Result<Vec<Communicator>> {
    let hub = Arc::new(Hub {
        room: Mutex::default(),
        news: Condvar::new(),
    });
    (0..RANKS)
        .map(|rank| {
            let mine = Rank {
                hub: hub.clone(),
                rank,
                state: Mutex::default(),
            };
            Communicator::over(mine, "room", rank, RANKS, Some(timeout))
        })
        .collect()
}

// Who panics, or does not come, ends its communicator with an error.
struct Panics;
impl Transport for Panics {
    fn start(&self, _: Operation) -> Outcome<()> {
        panic!("as it should")
    }
    fn wait(&self, _: u64, _: Duration, _: &str) -> Outcome<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }
    fn test(&self, _: u64) -> Outcome<bool> {
        Ok(false)
    }
    fn abort(&self, _: &str) {}
}

// Its answers have other sizes than were asked for, and are written nowhere.
struct Short;
impl Transport for Short {
    fn start(&self, _: Operation) -> Outcome<()> {
        Ok(())
    }
    fn wait(&self, _: u64, _: Duration, _: &str) -> Outcome<Vec<Vec<u8>>> {
        Ok(vec![vec![1; 3]])
    }
    fn test(&self, _: u64) -> Outcome<bool> {
        Ok(true)
    }
    fn abort(&self, _: &str) {}
}

fn own_transports(model: &str) -> Result<()> {
    on_threads(own_group(Duration::from_secs(20))?, |_, communicator| {
        serve(model, communicator)
    })?;
    let mut late = own_group(Duration::from_millis(50))?;
    let error = refused(late[0].barrier("alone"), "CONCLAVE_ERROR_COMM_TIMEOUT");
    assert!(error.peer == 1 && error.message.contains("did not come"));
    let mut panics = Communicator::over(Panics, "panics", 0, 1, None)?;
    refused(panics.barrier("a panic"), "CONCLAVE_ERROR_INTERNAL");
    let mut short = Communicator::over(Short, "short", 0, 1, None)?;
    refused(
        short.all_gather(&[1i64], "sizes"),
        "CONCLAVE_ERROR_COMM_MISMATCH",
    );
    refused(
        Communicator::over(Short, "no rank", 1, 1, None).map(|_| ()),
        "CONCLAVE_ERROR_INVALID_ARGUMENT",
    );
    Ok(())
}

fn weights(seed: usize) -> [Vec<f32>; 3] {
    [
        numbers(EXPERTS * 2 * WIDTH * HIDDEN, 0.3, seed),
        numbers(EXPERTS * HIDDEN * WIDTH, 0.3, seed + 1),
        numbers(EXPERTS * HIDDEN, 0.5, seed + 2),
    ]
}

fn source_of(arrays: &[Vec<f32>; 3]) -> Result<Source<'_>> {
    Source::new(&[
        (
            "gate_up",
            View::new(&arrays[0], &[EXPERTS, 2 * WIDTH, HIDDEN])?,
        ),
        ("down", View::new(&arrays[1], &[EXPERTS, HIDDEN, WIDTH])?),
        ("router", View::new(&arrays[2], &[EXPERTS, HIDDEN])?),
    ])
}

// A trainer's weights reach every replica, and those who wait hear why there are none.
fn broadcasts() -> Result<()> {
    let (old, new) = (weights(1), weights(5));
    on_threads(local_group(RANKS, None)?, |rank, mut communicator| {
        let context = Context::new(1)?;
        let spec = Spec::from_json(SPEC)?;
        let options = LayerOptions::default();
        let layer = Layer::new(&context, &spec, &source_of(&old)?, options)?;
        let goal = Layer::new(&context, &spec, &source_of(&new)?, options)?;
        let source = if rank == 1 {
            Some(source_of(&new)?)
        } else {
            None
        };
        let mut refit = layer.refit_over(&RefitOptions::default(), &mut communicator)?;
        if rank == 1 {
            refit.refuse("the trainer is not ready")?;
        } else {
            let error = refused(refit.stage(1, None), "CONCLAVE_ERROR_COMM_MISMATCH");
            assert!(error.message.contains("not ready") && error.peer == 1);
        }
        refit.stage(1, source.as_ref())?;
        refit.commit()?;
        drop(refit);
        assert!(layer.content_hash()? == goal.content_hash()?);

        let mut next = layer.refit_over(&RefitOptions::default(), &mut communicator)?;
        if rank == 1 {
            return next.withdraw("the trainer has stopped");
        }
        let error = refused(next.stage(1, None), "CONCLAVE_ERROR_COMM_MISMATCH");
        assert!(error.message.contains("has stopped"), "{}", error);
        Ok(())
    })
}

fn conversions(model: &str, folder: &str) -> Result<()> {
    let context = Context::new(2)?;
    let result = Path::new(folder).join("int8");
    let mut stop = |phase: &str, done: u64, total: u64| {
        assert!(phase == "converting" && done <= total);
        ControlFlow::Break(String::from("the user has left"))
    };
    let stopped = ConvertOptions {
        progress: Some(&mut stop),
        ..ConvertOptions::default()
    };
    let error = refused(
        convert_model(&context, model, &result, "int8-channel", stopped),
        "CONCLAVE_ERROR_CANCELLED",
    );
    assert!(error.message.contains("the user has left") && !result.exists());
    let options = ConvertOptions {
        tokens: 4,
        ..ConvertOptions::default()
    };
    let made = convert_model(&context, model, &result, "int8-channel", options)?;
    assert!(made.bytes_after < made.bytes_before && made.worst_error < 0.1);
    assert!(made.report.contains("\"matrices\""));
    assert!(!Checkpoint::open(&made.model)?.layers()?.is_empty());
    let again = ConvertOptions::default();
    let error = refused(
        convert_model(&context, model, &result, "int8-channel", again),
        "CONCLAVE_ERROR_FILE_WRITE",
    );
    assert!(error.file.contains("int8"), "{}", error);
    println!("{}: {} bytes", made.model.display(), made.bytes_after);
    Ok(())
}

fn run(model: &str, folder: &str) -> Result<()> {
    on_threads(local_group(RANKS, None)?, |_, communicator| {
        serve(model, communicator)
    })?;
    on_threads(local_group(RANKS, None)?, |_, communicator| {
        collectives(communicator)
    })?;
    over_tcp(model)?;
    own_transports(model)?;
    broadcasts()?;
    conversions(model, folder)
}

fn main() {
    let given: Vec<_> = std::env::args().skip(1).collect();
    if given.len() != 2 {
        eprintln!("usage: ranks MODEL FOLDER");
        std::process::exit(2);
    }
    if let Err(error) = run(&given[0], &given[1]) {
        eprintln!("{}", error);
        std::process::exit(1);
    }
}
