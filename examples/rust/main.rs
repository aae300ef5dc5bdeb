// Runs every MoE layer of a model directory or GGUF file from Rust, on several threads, and shows an
// error. Nothing but the standard library and conclave is needed:
//   rustc --edition 2021 -O main.rs -C linker=c++ \
//     $(for word in $(pkg-config --libs conclave) -lc; do echo "-C link-arg=$word"; done)
mod conclave;
// The declarations of the crate: those of C are written down once.
#[path = "../rust_crate/src/ffi.rs"]
mod ffi;

use conclave::{Checkpoint, Context, DownFactors, Layer, Result, Router};

const TOKENS: usize = 8;
const RANK: usize = 2;

fn rows(layer: &Layer) -> Vec<f32> {
    (0..TOKENS * layer.hidden_size).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

// A router of this program's own: token t goes to experts t and t + 1.
fn route_by_rotation(context: &Context) -> Result<()> {
    context.add_router("rotation", |rows| {
        let tokens = rows.ids.len() / rows.top_k;
        for (token, row) in rows.logits.chunks(rows.num_logits).take(tokens).enumerate() {
            for slot in 0..rows.top_k {
                let expert = (rows.first_token + token + slot) % rows.num_experts;
                rows.ids[token * rows.top_k + slot] = expert as i32;
                rows.weights[token * rows.top_k + slot] = row[expert];
            }
        }
    })?;
    context.add_router("panicking", |_| panic!("as it should"))?;
    let spec = r#"{"num_experts": 4, "top_k": 2, "router": {"name": "rotation"}}"#;
    let (ids, weights) = Router::new(context, spec)?.route(&[0.5f32; 12])?;
    assert!(ids == [0, 1, 1, 2, 2, 3] && weights == [0.5f32; 6]);
    let panicking = Router::new(context, &spec.replace("rotation", "panicking"))?;
    match panicking.route(&[0.5f32; 12]) {
        Ok(_) => panic!("a router that panics was taken for one that routes"),
        Err(error) => println!("as it should, a panic ends in {}", error),
    }
    Ok(())
}

// Every expert's down product gets an adapter in turn: results change, and come back without it.
fn adapt(layer: &Layer, hidden: &[f32], plain: &[f32]) -> Result<()> {
    let a = vec![0.25f32; RANK * layer.width];
    let b = vec![0.5f32; layer.hidden_size * RANK];
    let mut changed = 0;
    for expert in 0..layer.num_experts {
        let id = layer.add_adapter(&DownFactors { expert, a: &a, b: &b, scale: 0.5 })?;
        let mut out = vec![0.0f32; hidden.len()];
        layer.forward(hidden, &mut out, Some(id))?;
        changed += (out != plain) as i64;
        layer.forward(hidden, &mut out, None)?;
        assert!(out == plain, "rows without an adapter have other bits");
        layer.remove_adapter(id)?;
    }
    assert!(changed > 0, "no adapter has changed anything");
    Ok(())
}

fn run(path: &str) -> Result<()> {
    let context = Context::new()?;
    let checkpoint = Checkpoint::open(path)?;
    println!("conclave {}: {}", conclave::version(), checkpoint.model_type()?);
    route_by_rotation(&context)?;
    for index in checkpoint.layers()? {
        let layer = Layer::from_checkpoint(&context, &checkpoint, index, TOKENS as i64, RANK as i64)?;
        let hidden = rows(&layer);
        let mut out = vec![0.0f32; hidden.len()];
        layer.forward(&hidden, &mut out, None)?;
        let mut again = vec![0.0f32; hidden.len()];
        std::thread::scope(|threads| {
            threads.spawn(|| layer.forward(&hidden, &mut again, None)).join().expect("no panic")
        })?;
        assert!(out.iter().all(|value| value.is_finite()) && out.iter().any(|value| *value != 0.0));
        assert!(out == again, "a second forward has other bits");
        let sum: f32 = out.iter().map(|value| value.abs()).sum();
        println!(
            "layer {}: {} experts, mean magnitude {:.4}, {} tokens",
            index,
            layer.num_experts,
            sum / out.len() as f32,
            layer.tokens()?
        );
        adapt(&layer, &hidden, &out)?;
        // A row less than the input has.
        let len = out.len() - layer.hidden_size;
        match layer.forward(&hidden, &mut out[..len], None) {
            Ok(()) => panic!("an output of {} rows was taken", TOKENS - 1),
            Err(error) => {
                assert!(error.status == ffi::ERROR_SHAPE);
                println!("  as it should, another shape ends in {}", error);
            }
        }
        assert!(layer.explain()?.contains("kernel"));
    }
    Ok(())
}

fn main() {
    let path = match std::env::args().nth(1) {
        Some(path) => path,
        None => {
            eprintln!("usage: main MODEL");
            std::process::exit(2);
        }
    };
    if let Err(error) = run(&path) {
        eprintln!("{}", error);
        std::process::exit(1);
    }
}
