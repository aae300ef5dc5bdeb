//! Runs a model's layers on several threads, with adapters by token; new weights while a layer
//! serves, packed and in place; and routing that is recorded and replayed with the same bits.
use conclave::{
    Call, Checkpoint, Context, Error, Factors, Layer, LayerOptions, LoraCheckpoint, Matrix, Mlp,
    Recorder, RefitOptions, Replay, Result, Source, Spec, TokenKey, View, ViewMut, WhenFull,
};

const TOKENS: usize = 12;
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

// Rows [T, hidden_size] through a layer; adapters are chosen by token where they are given.
fn forward<W>(layer: &Layer<W>, hidden: &[f32], adapters: Option<&[i32]>) -> Result<Vec<f32>> {
    let shape = [
        hidden.len() / layer.info.hidden_size,
        layer.info.hidden_size,
    ];
    let mut out = vec![0.0; hidden.len()];
    let call = Call::new(View::new(hidden, &shape)?, ViewMut::new(&mut out, &shape)?);
    layer.forward(match adapters {
        Some(ids) => call.adapter_ids(View::new(ids, &[ids.len()])?),
        None => call,
    })?;
    Ok(out)
}

// Threads share the layer; each has a workspace of its own.
fn on_threads(context: &Context, layer: &Layer, hidden: &[f32], expected: &[f32]) -> Result<()> {
    let shape = [TOKENS, layer.info.hidden_size];
    std::thread::scope(|threads| {
        let one = || -> Result<()> {
            let mut workspace = layer.workspace(context, TOKENS as i64)?;
            let mut out = vec![0.0; hidden.len()];
            for _ in 0..3 {
                let call = Call::new(View::new(hidden, &shape)?, ViewMut::new(&mut out, &shape)?);
                layer.forward(call.workspace(&mut workspace))?;
                assert!(out == expected, "a thread has other bits");
            }
            Ok(())
        };
        let both = [threads.spawn(one), threads.spawn(one)];
        both.into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })
}

fn adapters(context: &Context, model: &Checkpoint, saved: &LoraCheckpoint) -> Result<()> {
    for index in saved.layers()? {
        let options = LayerOptions {
            max_tokens: TOKENS as i64,
            max_adapter_rank: saved.max_rank()?,
            ..LayerOptions::default()
        };
        let layer = Layer::from_checkpoint(context, model, index, options)?;
        let (hidden_size, width) = (layer.info.hidden_size, layer.info.intermediate_size);
        let hidden = numbers(TOKENS * hidden_size, 1.0, 1);
        let plain = forward(&layer, &hidden, None)?;
        on_threads(context, &layer, &hidden, &plain)?;

        let peft = layer.add_adapter_from(saved, index, model)?;
        let (a, b) = (numbers(2 * width, 0.5, 2), numbers(2 * hidden_size, 0.5, 3));
        let a = View::new(&a, &[2, width])?;
        let b = View::new(&b, &[hidden_size, 2])?;
        let (mlp, matrix) = (Mlp::Routed, Matrix::Down);
        let factors: Vec<_> = (0..layer.info.num_experts as i64)
            .map(|expert| Factors {
                mlp,
                matrix,
                expert,
                a,
                b,
                scale: 0.5,
            })
            .collect();
        let arrays = layer.add_adapter("arrays", &factors)?;
        let ids: Vec<i32> = (0..TOKENS).map(|t| [-1, peft, arrays][t % 3]).collect();
        let mixed = forward(&layer, &hidden, Some(&ids))?;
        for (t, row) in mixed.chunks(hidden_size).enumerate() {
            let all = forward(&layer, &hidden, Some(&[ids[t]; TOKENS]))?;
            let same = &plain[t * hidden_size..][..hidden_size] == row;
            assert!(
                all[t * hidden_size..][..hidden_size] == *row,
                "a token has its adapter"
            );
            assert!(same == (ids[t] == -1), "tokens without one keep their bits");
        }
        layer.remove_adapter(peft)?;
        refused(
            forward(&layer, &hidden, Some(&ids)),
            "CONCLAVE_ERROR_INVALID_ARGUMENT",
        );
        println!(
            "layer {}: {}",
            index,
            layer.adapters_json()?.replace(['\n', ' '], "")
        );
    }
    Ok(())
}

// A trainer makes them in a step.
struct Weights {
    gate_up: Vec<f32>,
    down: Vec<f32>,
    router: Vec<f32>,
}

impl Weights {
    fn new(seed: usize) -> Weights {
        Weights {
            gate_up: numbers(EXPERTS * 2 * WIDTH * HIDDEN, 0.3, seed),
            down: numbers(EXPERTS * HIDDEN * WIDTH, 0.3, seed + 1),
            router: numbers(EXPERTS * HIDDEN, 0.5, seed + 2),
        }
    }

    fn source(&self) -> Result<Source<'_>> {
        Source::new(&[
            (
                "gate_up",
                View::new(&self.gate_up, &[EXPERTS, 2 * WIDTH, HIDDEN])?,
            ),
            ("down", View::new(&self.down, &[EXPERTS, HIDDEN, WIDTH])?),
            ("router", View::new(&self.router, &[EXPERTS, HIDDEN])?),
        ])
    }
}

fn refits(context: &Context, spec: &Spec) -> Result<()> {
    let (old, new) = (Weights::new(1), Weights::new(5));
    let hidden = numbers(TOKENS * HIDDEN, 1.0, 9);
    let layer = Layer::new(context, spec, &old.source()?, LayerOptions::default())?;
    let goal = Layer::new(context, spec, &new.source()?, LayerOptions::default())?;
    let before = forward(&layer, &hidden, None)?;
    let expected = forward(&goal, &hidden, None)?;

    // One expert alone; without a commit nothing has changed.
    let gate_up = View::new(&new.gate_up[..2 * WIDTH * HIDDEN], &[1, 2 * WIDTH, HIDDEN])?;
    let down = View::new(&new.down[..HIDDEN * WIDTH], &[1, HIDDEN, WIDTH])?;
    let first = [("gate_up", gate_up), ("down", down)];
    let first = Source::of_experts(&first, EXPERTS, &[0])?;
    let mut refit = layer.refit(&RefitOptions {
        experts: &[0],
        ..RefitOptions::default()
    })?;
    refit.stage(&first)?;
    assert!(refit.is_staged()?);
    let second = layer.refit(&RefitOptions::default()).map(|_| ());
    refused(second, "CONCLAVE_ERROR_STATE");
    drop(refit);
    assert!(
        forward(&layer, &hidden, None)? == before,
        "a refit that is dropped rolls back"
    );

    // The arrays of a trainer's step are free again once they are staged.
    let mut refit = layer.refit(&RefitOptions {
        epoch: 7,
        ..RefitOptions::default()
    })?;
    refused(refit.commit(), "CONCLAVE_ERROR_STATE");
    refit.stage(&Weights::new(5).source()?)?;
    refit.commit()?;
    assert!(
        forward(&layer, &hidden, None)? == expected,
        "forwards have the new weights"
    );
    assert!(layer.content_hash()? == goal.content_hash()? && layer.stats()?.refit_epoch == 7);
    let stale = RefitOptions {
        epoch: 7,
        ..RefitOptions::default()
    };
    refused(
        layer.refit(&stale).map(|_| ()),
        "CONCLAVE_ERROR_INVALID_ARGUMENT",
    );

    // Weights that are read where they lie: `old` and `new` have to outlive this layer.
    let in_place = Layer::in_place(context, spec, &old.source()?, LayerOptions::default())?;
    assert!(
        forward(&in_place, &hidden, None)? == before,
        "in place has the same bits"
    );
    let mut refit = in_place.refit(&RefitOptions::default())?;
    refit.stage(&new.source()?)?;
    refit.commit()?;
    assert!(
        forward(&in_place, &hidden, None)? == expected,
        "in place has the new weights"
    );
    Ok(())
}

fn records(context: &Context, spec: &Spec, path: &str) -> Result<()> {
    let layer = Layer::new(
        context,
        spec,
        &Weights::new(1).source()?,
        LayerOptions::default(),
    )?;
    let hidden = numbers(TOKENS * HIDDEN, 1.0, 9);
    let rows = [TOKENS, HIDDEN];
    let slots = [TOKENS, layer.info.num_slots];
    let mut ids = vec![0i32; slots[0] * slots[1]];
    let mut weights = vec![0f32; ids.len()];
    let mut out = vec![0f32; hidden.len()];
    let call = Call::new(View::new(&hidden, &rows)?, ViewMut::new(&mut out, &rows)?);
    layer.forward(call.capture(
        ViewMut::new(&mut ids, &slots)?,
        ViewMut::new(&mut weights, &slots)?,
    ))?;
    let keys: Vec<_> = (0..TOKENS)
        .map(|t| TokenKey {
            sequence: 3,
            position: t as i64,
        })
        .collect();
    let recorder = Recorder::new(&[(0, spec)], TOKENS as i64, WhenFull::Error)?;
    let (id_view, weight_view) = (View::new(&ids, &slots)?, View::new(&weights, &slots)?);
    recorder.record(0, id_view, weight_view, &keys)?;
    refused(
        recorder.record(0, id_view, weight_view, &keys),
        "CONCLAVE_ERROR_STATE",
    );
    refused(
        recorder.record(0, id_view, weight_view, &[]),
        "CONCLAVE_ERROR_SHAPE",
    );
    assert!(recorder.counts(0)? == (TOKENS as i64, 0));
    recorder.write(path)?;

    // Back to front, as another batch would have them.
    let replay = Replay::open(path)?;
    let comparison = replay.compare_json(&Replay::of(&recorder)?, 4)?;
    assert!(comparison.contains("\"equal\": true"), "{}", comparison);
    assert!(replay.layers()?[0].num_tokens == TOKENS as i64);
    let backwards: Vec<_> = keys.iter().rev().copied().collect();
    let (mut found_ids, mut found_weights) = (vec![0i32; ids.len()], vec![0f32; ids.len()]);
    let to_ids = ViewMut::new(&mut found_ids, &slots)?;
    replay.find(
        0,
        &backwards,
        to_ids,
        ViewMut::new(&mut found_weights, &slots)?,
    )?;
    let turned: Vec<f32> = hidden.chunks(HIDDEN).rev().flatten().copied().collect();
    let mut again = vec![0f32; hidden.len()];
    let call = Call::new(View::new(&turned, &rows)?, ViewMut::new(&mut again, &rows)?);
    layer.forward(call.routing(
        View::new(&found_ids, &slots)?,
        View::new(&found_weights, &slots)?,
    ))?;
    assert!(
        again.chunks(HIDDEN).rev().flatten().eq(out.iter()),
        "replayed rows have other bits"
    );
    println!("{} tokens were replayed with the same bits", TOKENS);
    Ok(())
}

fn run(model: &str, adapter: &str, path: &str) -> Result<()> {
    println!("conclave {}", conclave::version());
    let context = Context::new(2)?;
    let spec = Spec::from_json(SPEC)?;
    adapters(
        &context,
        &Checkpoint::open(model)?,
        &LoraCheckpoint::open(adapter)?,
    )?;
    refits(&context, &spec)?;
    records(&context, &spec, path)?;
    let error = refused(
        Checkpoint::open("no/such/model").map(|_| ()),
        "CONCLAVE_ERROR_FILE_NOT_FOUND",
    );
    assert!(error.file.contains("no/such/model"), "{}", error);
    refused(
        View::new(&[0f32; 5], &[2, 3]).map(|_| ()),
        "CONCLAVE_ERROR_SHAPE",
    );
    refused(
        Spec::from_json("{\0}").map(|_| ()),
        "CONCLAVE_ERROR_INVALID_ARGUMENT",
    );
    Ok(())
}

fn main() {
    let given: Vec<_> = std::env::args().skip(1).collect();
    if given.len() != 3 {
        eprintln!("usage: serve MODEL ADAPTER FILE");
        std::process::exit(2);
    }
    if let Err(error) = run(&given[0], &given[1], &given[2]) {
        eprintln!("{}", error);
        std::process::exit(1);
    }
}
